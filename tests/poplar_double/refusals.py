"""What the driver's own sources refuse, pass by pass, and where the double does: or why it does not.

Of graphcore/tensorflow, below ``tensorflow/compiler/plugin/poplar/``: FailedPrecondition, InvalidArgument and
Unimplemented of the passes and visitors that a Keras model with replicas, accumulation, a pipeline, recomputation or
offloading goes through, of the compiler, of what executes a program, and of kernels.  They were read in public
versions of these files from the history of r2.6/sdk-release-3.4, not each of which is the release's last.  Left out are
what only host embeddings, ``outside_compilation_scope``, recurrent layers and the embedded runtime reach, and
InternalError, which stands for a mistake of the driver.  ``files_read.json`` says which passes were read, in which
stored version, and which were not.

A program means the XLA graph that ``keras/ipu`` makes; what that never makes wrong, no caller can see.
"""

from typing import List, NamedTuple


class Refusal(NamedTuple):
    """One refusal.

    Attributes:
        file: below ``driver/``, or ``kernels/...``.
        symbol: that refuses.
        error: "FailedPrecondition", "InvalidArgument" or "Unimplemented".
        when: in short.
        rule: the function of the double that refuses it too (``module.function``); "" where none does.
        why_not: where none does, the reason.
    """

    file: str
    symbol: str
    error: str
    when: str
    rule: str = ""
    why_not: str = ""


_KERAS = "the graph is Keras': "
_OFF = "keras/ipu refuses the keyword before: "
_PYTHON = "the Python layer writes the attribute, and the words that the driver knows"
_DRIVER = "it takes a mistake of the driver's own passes, which make what is looked at"

REFUSALS: List[Refusal] = [
    # Remote memory
    Refusal(
        "passes/variables_offload_and_partition.cc",
        "VariablesOffloadAndPartition::Optimize",
        "FailedPrecondition",
        "optimizer state is to be offloaded, and there is no remote memory",
        "rules.check_remote_memory",
    ),
    Refusal(
        "passes/variables_offload_and_partition.cc",
        "VariablesOffloadAndPartition::Optimize",
        "Unimplemented",
        "state is to be shared out over replicas, and is not offloaded",
        "rules._check_sharding",
    ),
    Refusal(
        "passes/variables_offload_and_partition.cc",
        "VariablesOffloadAndPartition::Optimize",
        "FailedPrecondition",
        "a loop holds several weight updates",
        why_not=_KERAS + "one optimizer, one update",
    ),
    Refusal(
        "passes/pipeline_fifo_inserter.cc",
        "PipelineFIFOInserter::OffloadFifos",
        "FailedPrecondition",
        "activations are to be offloaded, and there is no remote memory",
        "rules.check_remote_memory",
    ),
    Refusal(
        "passes/pipeline_fifo_inserter.cc",
        "PipelineFIFOInserter::InsertInPipeline",
        "FailedPrecondition",
        "a backward stage reads what another stage than its own or the one before computed",
        why_not=_KERAS + "_make_pipeline hands every tensor from stage to stage",
    ),
    Refusal(
        "passes/gradient_accumulation_buffers_offload.cc",
        "GradientAccumulationBuffersOffload::ShouldOffloadInPipeline",
        "FailedPrecondition",
        "accumulated gradients are to be offloaded, and there is no remote memory",
        "rules.check_remote_memory",
    ),
    # Accumulation
    Refusal(
        "passes/gradient_accumulation_verifier.cc",
        "GradientAccumulationVerifier::VerifyGenericGradientAccumulation",
        "FailedPrecondition",
        "a loop's iterations are no multiple of the accumulated micro-batches",
        "engine.Engine._compile",
    ),
    Refusal(
        "passes/gradient_accumulation_verifier.cc",
        "GradientAccumulationVerifier::VerifyGenericGradientAccumulation",
        "FailedPrecondition",
        "GradientAccumulationOptimizerV2 inside another optimizer",
        why_not=_KERAS + "it wraps the model's optimizer itself, outermost",
    ),
    Refusal(
        "passes/gradient_accumulation_verifier.cc",
        "GradientAccumulationVerifier::VerifyGenericGradientAccumulation",
        "FailedPrecondition",
        "accumulation outside of a loop, or for a number of micro-batches that is only known at run time",
        why_not=_KERAS + "train_function is a loop of steps_per_execution, and the number is a constant",
    ),
    Refusal(
        "passes/gradient_accumulation_verifier.cc",
        "GradientAccumulationVerifier::VerifyStatefulGradientAccumulation",
        "FailedPrecondition",
        "accumulation with momentum in a replicated graph",
        why_not="operations of the old GradientAccumulationOptimizer, which keras/ipu does not use",
    ),
    # Pipelines
    Refusal(
        "visitors/pipeline_visitor.cc",
        "VerifyPipelineArguments",
        "FailedPrecondition",
        "the depth is no multiple of what the schedule overlaps",
        "rules.check_pipeline",
    ),
    Refusal(
        "visitors/grouped_overlap_pipeline_visitor.cc",
        "VerifyPipelineArgumentsFixed",
        "FailedPrecondition",
        "with I/O tiles the depth is below the overlap and two",
        "rules.check_pipeline",
    ),
    Refusal(
        "tools/pipeline_util.cc",
        "GetPipelineRecomputationMode",
        "Unimplemented",
        "a recomputation mode that the schedule does not have",
        "rules.check_pipeline",
    ),
    Refusal(
        "tools/pipeline_util.cc",
        "GetPipelines",
        "FailedPrecondition",
        "two pipelines in one program",
        why_not=_KERAS + "a model is one pipeline",
    ),
    Refusal(
        "tools/pipeline_util.cc",
        "GetPipelineStages",
        "FailedPrecondition",
        "stages with a hole, none at all, or not as many backward as forward ones",
        "rules.stages_of",
    ),
    Refusal(
        "tools/pipeline_util.cc",
        "VerifyPipelineStagesBeforeFixing",
        "Unimplemented",
        "a stage whose outputs are no tuple, or a forward stage without a device",
        why_not=_KERAS + "pipelining_ops.pipeline makes the stages",
    ),
    Refusal(
        "tools/pipeline_util.cc",
        "VerifyPipelineAfterFixing",
        "Unimplemented",
        "an operation that belongs to no stage",
        why_not=_KERAS
        + "every layer has a stage; Extension.set_pipeline_stage_assignment refuses one without",
    ),
    Refusal(
        "passes/pipeline_fixer.cc",
        "PipelineFixer::RemovePipelineWrapper",
        "FailedPrecondition",
        "a pipeline with several calls around its stages",
        why_not=_KERAS + "pipelining_ops.pipeline makes one",
    ),
    Refusal(
        "passes/pipeline_fixer.cc",
        "PipelineFixer::FixConstantGradients",
        "FailedPrecondition",
        "a gradient that is added to what is no accumulator",
        why_not=_KERAS + "the accumulators are pipelining_ops'",
    ),
    Refusal(
        "passes/pipeline_fixer.cc",
        "CreateLoweringOrder",
        "FailedPrecondition",
        "a weight update that reads what a stage computed, other than gradients",
        why_not="it needs the compiler: the session's updates read gradients, weights and their own state alone",
    ),
    Refusal(
        "passes/pipeline_verifier.cc",
        "PipelineVerifier::VerifyGradientAccumulation",
        "FailedPrecondition",
        "a gradient accumulated outside of a backward stage",
        why_not=_KERAS + "the accumulators are pipelining_ops'",
    ),
    Refusal(
        "passes/pipeline_fixer.cc",
        "PipelineFixer::FixPipeline",
        "FailedPrecondition",
        "stages that recompute, before the pass that makes them",
        why_not=_KERAS + "it makes none",
    ),
    Refusal(
        "tools/pipeline_util.cc",
        "PipelineDataflowAnalysis::VerifyParameterUsage",
        "Unimplemented",
        "stages on different IPUs use one variable",
        "rules._check_shared_layers",
    ),
    Refusal(
        "tools/pipeline_util.cc",
        "PipelineDataflowAnalysis::VerifyGradientAccumulatorCreateUsage",
        "Unimplemented",
        "stages on different IPUs accumulate the gradient of one variable",
        "rules._check_shared_layers",
    ),
    Refusal(
        "tools/pipeline_util.cc",
        "PipelineDataflowAnalysis::VerifyExecutionCounterUsage",
        "Unimplemented",
        "stages on different IPUs count executions together",
        why_not="no operation of the session's networks counts executions",
    ),
    Refusal(
        "tools/pipeline_util.cc",
        "PipelineDataflowAnalysis::VerifyInfeedUsage",
        "Unimplemented",
        "two stages read the infeed",
        why_not=_KERAS + "stage 0 reads it, and _make_pipeline hands labels and weights on",
    ),
    Refusal(
        "tools/pipeline_util.cc",
        "PipelineDataflowAnalysis::HasToBeLowered",
        "FailedPrecondition",
        "accumulators, copies between IPUs, stashes and buffers with other users than the next stage",
        why_not="the driver's own passes insert them",
    ),
    Refusal(
        "tools/pipeline_util.cc",
        "PipelineDataflowAnalysis::HasToBeLowered",
        "Unimplemented",
        "a copy or a stash between stages that are not neighbours",
        why_not="the driver's own passes insert them",
    ),
    Refusal(
        "tools/pipeline_util.cc",
        "PipelineDataflowAnalysis::GetAnalysis",
        "FailedPrecondition",
        "stages that recompute where a pass allows none",
        why_not="the driver's own passes insert them",
    ),
    Refusal(
        "tools/pipeline_util.cc",
        "GetFifoDepthMultiplier",
        "FailedPrecondition",
        "a schedule that does not exist; so do other functions that ask for the schedule",
        "rules.check_pipeline",
    ),
    Refusal(
        "tools/pipeline_util.cc",
        "DuplicateGTEEdges",
        "FailedPrecondition",
        "a stage whose outputs are used whole; so does ConvertAllUsersToGTEs",
        why_not=_KERAS + "pipelining_ops.pipeline makes the stages",
    ),
    Refusal(
        "passes/pipeline_recomputation_stage_inserter.cc",
        "CloneStageCompWithStates",
        "FailedPrecondition",
        "a stage to be recomputed lies on several IPUs",
        why_not=_KERAS + "a stage has one IPU: device_mapping holds integers",
    ),
    Refusal(
        "poplar_compiler.cc",
        "ModuleExecutionCanStall",
        "Unimplemented",
        "two pipelines in one program",
        why_not=_KERAS + "a model is one pipeline",
    ),
    # The other passes
    Refusal(
        "passes/add_stochastic_rounding_options.cc",
        "NeedsSpecificSeedType",
        "FailedPrecondition",
        "an instruction of a kind of which the pass does not know whether it rounds",
        why_not=_KERAS + "every kind of XLA's that TensorFlow makes is known to it",
    ),
    Refusal(
        "passes/add_stochastic_rounding_options.cc",
        "AddStochasticRoundingOptions::ParseFrontendStochasticRoundingAttr",
        "FailedPrecondition",
        "a rounding attribute that is not one of its three words",
        why_not=_PYTHON,
    ),
    Refusal(
        "passes/backend_config_handler.cc",
        "BackendConfigHandler::Run",
        "FailedPrecondition",
        "a call of an unknown kind",
        why_not=_PYTHON,
    ),
    Refusal(
        "passes/combine_instructions.cc",
        "CombineInstructions::Run",
        "FailedPrecondition",
        "a program without an order of its instructions",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/convolution_classifier.cc",
        "ConvolutionClassifier::Run",
        "FailedPrecondition",
        "a program of which the flat copy is missing",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/dropout_with_reference_finder.cc",
        "DropoutWithReferenceFinder::Run",
        "FailedPrecondition",
        "a program of which the flat copy is missing",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/host_compute_schedule_optimizer.cc",
        "AddDependenciesOnPreviousShard",
        "FailedPrecondition",
        "an IPU sends to the host what waits for the IPU before it",
        why_not="the session has no outside_compilation_scope",
    ),
    Refusal(
        "passes/host_embedding_notification.cc",
        "HostEmbeddingNotification::Run",
        "FailedPrecondition",
        "several weight updates",
        why_not=_KERAS + "one optimizer, one update",
    ),
    Refusal(
        "passes/inplace_finder.cc",
        "InplaceFinder::Run",
        "FailedPrecondition",
        "one computation is called from two places",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/lower_frontend_attributes.cc",
        "LowerPipelineFrontendAttributes",
        "FailedPrecondition",
        "a pipeline without the options of its stages",
        why_not=_PYTHON,
    ),
    Refusal(
        "passes/lower_frontend_attributes.cc",
        "LowerFrontendAttributes::Run",
        "FailedPrecondition",
        "a rounding attribute that is not one of its three words",
        why_not=_PYTHON,
    ),
    Refusal(
        "passes/lower_frontend_attributes.cc",
        "LowerFrontendAttributes::Run",
        "FailedPrecondition",
        "a type of partial sums that does not exist, or is neither of 16 nor of 32 bits",
        why_not="the session sets partialsType in the options of convolutions and matrix products, and no scope of it",
    ),
    Refusal(
        "passes/module_flatten.cc",
        "ModuleFlatten::Run",
        "FailedPrecondition",
        "one computation is called from two places",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/multi_conv_fixer.cc",
        "MultiConvFixer::FixMultiConv",
        "FailedPrecondition",
        "convolutions that are to run together and depend on each other",
        why_not="the session's layers have no multi_conv",
    ),
    Refusal(
        "passes/multi_slice_simplifier.cc",
        "MultiSliceSimplifier::HandleMatch",
        "FailedPrecondition",
        "a pattern that the pass does not have",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/multi_use_feeds_finder.cc",
        "HandleFeeds",
        "Unimplemented",
        "two IPUs read one feed",
        why_not=_KERAS + "stage 0 reads the infeed and one stage writes the outfeed",
    ),
    Refusal(
        "passes/parse_poplar_backend_config.cc",
        "GetAttribute",
        "FailedPrecondition",
        "a call without an attribute of its kind, as a pipeline without its depth",
        why_not=_PYTHON,
    ),
    Refusal(
        "passes/parse_poplar_backend_config.cc",
        "ParsePoplarBackendConfig::Run",
        "FailedPrecondition",
        "a call of an unknown kind",
        why_not=_PYTHON,
    ),
    Refusal(
        "passes/pipeline_batch_serialization_buffer_inserter.cc",
        "PipelineBatchSerializationBufferInserter::InsertIntoPipeline",
        "FailedPrecondition",
        "activations between micro-batches in a row are to be offloaded, and there is no remote memory",
        why_not="the session leaves batch_serialization_iterations at 1",
    ),
    Refusal(
        "passes/pipeline_communication_optimizer.cc",
        "PipelineCommunicationOptimizer::Run",
        "FailedPrecondition",
        "a schedule that does not exist",
        "rules.check_pipeline",
    ),
    Refusal(
        "passes/pipeline_control_dependency_inserter.cc",
        "CheckAllReachable",
        "InvalidArgument",
        "a stage on several IPUs whose parts do not wait for its input",
        why_not=_KERAS + "a stage has one IPU: device_mapping holds integers",
    ),
    Refusal(
        "passes/pipeline_copy_inserter.cc",
        "InsertReadOnlyVariableCopies",
        "FailedPrecondition",
        "a pipeline with other outputs than inputs",
        why_not=_KERAS + "pipelining_ops.pipeline makes the stages",
    ),
    Refusal(
        "passes/pipeline_gradient_accumulation_optimizer.cc",
        "PipelineGradientAccumulationOptimizer::OptimizePipeline",
        "FailedPrecondition",
        "an accumulator that a stage reads twice, or that something else than the sum of gradients uses",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/remote_buffer_merger.cc",
        "FindRemoteBufferSources",
        "FailedPrecondition",
        "a buffer in remote memory that comes from several places, or from none that makes such buffers",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/remote_buffer_merger.cc",
        "FindRemoteBufferSources",
        "FailedPrecondition",
        "a buffer that is shared out over replicas and was not made to be",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/remote_buffer_merger.cc",
        "AddLoadStoreOffsets",
        "FailedPrecondition",
        "a function that is called from two places; so do IsInsideFunction and IsInsideElementwiseCluster",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/remote_parameter_parallel_combiner.cc",
        "Combine",
        "FailedPrecondition",
        "something else than loads and stores of remote memory is to be combined",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/replicated_resource_update_elementwise_clustering.cc",
        "ReplicatedResourceUpdateElementwiseClustering::AddClusterInput",
        "Unimplemented",
        "state is shared out, and several IPU-Link domains have several instances each",
        "rules.check_shared_out_state",
    ),
    Refusal(
        "passes/root_token_replacer.cc",
        "RootTokenReplacer::Run",
        "Unimplemented",
        "a token in a tuple within a tuple",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/seed_hoisting.cc",
        "SeedHoisting::Run",
        "FailedPrecondition",
        "one computation is called from two places",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/serialize_gradient_accumulation.cc",
        "ConvertGradientAccumulatorAdd",
        "FailedPrecondition",
        "an accumulator that something else than the sum of gradients uses",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/sharding_pass.cc",
        "ApplyParameterPredicateToBody",
        "FailedPrecondition",
        "a loop whose condition and body have other numbers of parameters",
        why_not=_KERAS + "train_function is a loop of steps_per_execution",
    ),
    Refusal(
        "passes/sharding_pass.cc",
        "ShardingPass::Run",
        "FailedPrecondition",
        "one computation is called from two places",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/sharding_pass.cc",
        "ShardingPass::Run",
        "FailedPrecondition",
        "instructions that belong to no IPU, whatever is tried",
        why_not=_KERAS + "every layer has a stage, and every stage an IPU",
    ),
    Refusal(
        "passes/slice_optimizer.cc",
        "ConvertToSliceApplyBase",
        "FailedPrecondition",
        "something else than a concatenation is to be added slice by slice",
        why_not=_DRIVER,
    ),
    Refusal(
        "passes/while_loop_to_repeat_simplify.cc",
        "ConvertWhileToRepeat",
        "FailedPrecondition",
        "a loop whose number of turns is not a constant",
        why_not="the pass itself takes it, and leaves the loop as it is",
    ),
    # The compiler
    Refusal(
        "poplar_compiler.cc",
        "CompileEngine",
        "FailedPrecondition",
        "PRE_COMPILE without a folder for executables",
        "rules.check_poplar",
    ),
    Refusal(
        "poplar_compiler.cc",
        "CompileEngine",
        "FailedPrecondition",
        "the system was never configured",
        "machine.Machine.device_ipus",
    ),
    Refusal(
        "poplar_compiler.cc",
        "CheckUnsupportedPrecompileInstructions",
        "FailedPrecondition",
        "PRE_COMPILE of a user's operation that is not hashable",
        "ops._run_user_op",
    ),
    Refusal(
        "poplar_compiler.cc",
        "CheckUnsupportedPrecompileInstructions",
        "FailedPrecondition",
        "PRE_COMPILE of outside_compilation_scope",
        why_not="the session has no such scope",
    ),
    Refusal(
        "poplar_compiler.cc",
        "GetNumIoTiles",
        "InvalidArgument",
        "more than 192 tiles for input and output",
        "rules.check_io_tiles",
    ),
    Refusal(
        "poplar_compiler.cc",
        "GetSchedulerList",
        "InvalidArgument",
        "a scheduler that does not exist",
        why_not="IPUConfig.scheduling.algorithm takes members of its enumeration alone",
    ),
    Refusal(
        "passes/constant_nan.cc",
        "ConstantNaN::Run",
        "FailedPrecondition",
        "a constant that is not a number",
        why_not="poplar_compiler.cc does not add the pass (TODO T10195); the session recognises its message",
    ),
    Refusal(
        "compiler_annotations.h",
        "AddInfeedInfo",
        "FailedPrecondition",
        "two infeeds of one name and different shapes",
        why_not=_OFF + "names are Keras' own (_set_infeed_queue_options_impl)",
    ),
    # Devices and execution
    Refusal(
        "poplar_executor.cc",
        "PoplarExecutor::CreatePoplarTarget",
        "InvalidArgument",
        "there are no IPUs",
        "config._find_device",
    ),
    Refusal(
        "poplar_executor.cc",
        "PoplarExecutor::CreatePoplarTarget",
        "FailedPrecondition",
        "there is no device of so many IPUs",
        "config._find_device",
    ),
    Refusal(
        "poplar_executor.cc",
        "PoplarExecutor::CreatePoplarTarget",
        "FailedPrecondition",
        "NEVER or PRE_COMPILE without a generation of IPUs",
        "config.configure",
    ),
    Refusal(
        "poplar_executor.cc",
        "PoplarExecutor::AttachToPoplarDevice",
        "InvalidArgument",
        "no device is the one that was asked for",
        why_not="a device of the configuration was found before: CreatePoplarTarget ends the process where it is not "
        "there, as config._ipus_of does",
    ),
    Refusal(
        "poplar_executor.cc",
        "PoplarExecutor::AttachToPoplarDevice",
        "InvalidArgument",
        "a device is to be attached that was never configured",
        "machine.Machine.device_ipus",
    ),
    Refusal(
        "poplar_executor.cc",
        "PoplarExecutor::CreatePoplarTarget",
        "InvalidArgument",
        "a model of an IPU by a device's number",
        "config._devices",
    ),
    Refusal(
        "poplar_executor.cc",
        "PoplarExecutor::CreatePoplarTarget",
        "Unimplemented",
        "several instances of a model of an IPU",
        why_not="the double has no model of an IPU; `doctor` says of --use_ipu_model that no IPU computes",
    ),
    Refusal(
        "poplar_executor.cc",
        "PoplarExecutor::ConfigurePoplarDevice",
        "FailedPrecondition",
        "another configuration than that of before",
        why_not="ipu.config.configure_ipu_system resets it before it configures",
    ),
    Refusal(
        "poplar_executor.cc",
        "PoplarExecutor::RegisterOutfeeds",
        "FailedPrecondition",
        "an outfeed of one name with another shape or other replicas",
        why_not=_OFF + "an outfeed is deleted at the end of fit and predict",
    ),
    Refusal(
        "poplar_executor.cc",
        "PoplarExecutor::DeleteInfeedIterator",
        "FailedPrecondition",
        "an infeed is deleted while it runs",
        why_not="it needs two threads; the session has one",
    ),
    Refusal(
        "poplar_executor.cc",
        "PoplarExecutor::DeleteOutfeed",
        "FailedPrecondition",
        "an outfeed is deleted while it runs",
        why_not="it needs two threads; the session has one",
    ),
    Refusal(
        "poplar_executor.cc",
        "PoplarExecutor::ExecuteEngineImpl",
        "InvalidArgument",
        "a program without its module",
        why_not="the embedded runtime's programs alone have none",
    ),
    Refusal(
        "poplar_executor.cc",
        "PoplarExecutor::MoveDeviceToHost",
        "InvalidArgument",
        "a state of a type that replicas cannot share out",
        why_not="it is of 64 bits, which the session's states are not",
    ),
    Refusal(
        "poplar_executable.cc",
        "PoplarExecutable::ExecuteAsyncOnStream",
        "InvalidArgument",
        "a program runs on a connection of NEVER",
        "engine.Engine._compile",
    ),
    Refusal(
        "poplar_executable.cc",
        "PoplarExecutable::ExecuteAsyncOnStream",
        "InvalidArgument",
        "verified transfers",
        why_not="no leaf of IPUConfig that the session sets asks for them",
    ),
    # Kernels
    Refusal(
        "kernels/datastream/feeds.cc",
        "GetFeedConfig",
        "FailedPrecondition",
        "data of a type that IPUs do not take",
        "rules.check_feed",
    ),
    Refusal(
        "kernels/datastream/feeds.cc",
        "GetFeedConfig",
        "InvalidArgument",
        "more or fewer elements in advance than 1 to 255",
        "rules.check_queues",
    ),
    Refusal(
        "kernels/datastream/feeds.cc",
        "IPUCreateDatasetIteratorOp",
        "InvalidArgument",
        "an input without numbers",
        "rules.check_feed",
    ),
    Refusal(
        "kernels/datastream/feeds.cc",
        "PopDatastreamOutfeedDequeueOp::Compute",
        "FailedPrecondition",
        "the last element of an outfeed that nothing went through",
        why_not=_OFF + "Keras' outfeeds have all elements (outfeed_mode)",
    ),
    Refusal(
        "kernels/poprand/random.cc",
        "PopopsStatelessOp::Compile",
        "InvalidArgument",
        "a stateless operation of before TensorFlow 2.5 whose seed is not two numbers",
        why_not="TensorFlow 2.6 makes operations of the second version, and looks at the seed itself",
    ),
    Refusal(
        "kernels/popops/normalise_image.cc",
        "NormaliseImageOp",
        "InvalidArgument",
        "images of other than three channels, or factors that are not constant",
        "ops.normalise_image",
    ),
    Refusal(
        "kernels/poputil/user_operation.cc",
        "PoputilUserOp",
        "InvalidArgument",
        "a library that cannot be opened or lacks the symbol, or outputs of unknown shape",
        "ops._run_user_op",
    ),
]
