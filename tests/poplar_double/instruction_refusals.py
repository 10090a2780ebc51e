"""What the driver refuses where it makes Poplar's program of an instruction: ``driver/ops``, and what it shares.

Of the same kind as ``refusals.REFUSALS``, from the files below ``ops/`` and ``tools/`` that ``files_read.json`` says
were read.  Nearly all look at what the driver's own passes made of a program, which none of its users can make wrong.
"""

from typing import List

from .refusals import Refusal

_PASSES = "it takes a mistake of the driver's own passes, which make what is looked at"
_KERAS = "no layer, loss or optimizer of Keras makes it: "

INSTRUCTION_REFUSALS: List[Refusal] = [
    Refusal(
        "ops/feed_ops.cc",
        "CreateOutfeed",
        "InvalidArgument",
        "outputs within outputs go through an outfeed",
        why_not="keras/ipu sends a flat list of them",
    ),
    Refusal(
        "ops/tensor_ops.cc",
        "ReinterpretAsUnsigned",
        "InvalidArgument",
        "places that are no whole numbers of 32 bits",
        why_not="those of 64 bits are made such before, and TensorFlow takes no others",
    ),
    Refusal(
        "ops/tensor_ops.cc",
        "CreateIota",
        "Unimplemented",
        "a range of more than 2**31 numbers",
        why_not="it is larger than the memory of an IPU",
    ),
    Refusal(
        "ops/custom_ops/popops/expression_helpers.cc",
        "GetConstantInput",
        "FailedPrecondition",
        "a constant of another type than bool, whole numbers, 16 and 32 bits; so do older maths_ops.cc",
        why_not="precisions are 16 and 32 bits, and 64 bits become 32 where TensorFlow's graph becomes XLA's",
    ),
    Refusal(
        "ops/custom_ops/popops/elementwise.cc",
        "TernaryElementwiseOp::Compute",
        "FailedPrecondition",
        "an operation of three tensors that is neither clamp nor select",
        why_not=_PASSES,
    ),
    Refusal(
        "ops/custom_ops/popops/fusions.cc",
        "ReversePathTransform",
        "FailedPrecondition",
        "a bias whose layout is asked for through a pad or a concatenation",
        why_not=_PASSES,
    ),
    Refusal(
        "ops/custom_ops/popops/conv_ops.cc",
        "Conv2DOp::Allocator",
        "FailedPrecondition",
        "the layout of an operand that has none; so do matmul, gather, scatter, top-k, norms and transposed weights",
        why_not=_PASSES,
    ),
    Refusal(
        "ops/custom_ops/popops/random.cc",
        "RngOp::Creator",
        "Unimplemented",
        "random whole numbers between bounds that are no constants",
        why_not=_KERAS + "numbers are drawn between 0 and 1, and scaled",
    ),
    Refusal(
        "ops/custom_ops/popops/sort_ops.cc",
        "SortOp::Creator",
        "Unimplemented",
        "a sort by another comparison than of two numbers, or of more than two tensors",
        why_not=_KERAS + "tf.sort and tf.argsort are top-k, which has an instruction of its own",
    ),
    Refusal(
        "ops/custom_ops/popops/within_replicas.cc",
        "ValidateInputSharding",
        "FailedPrecondition",
        "a collective within a replica that has not one operand for each IPU, in their order",
        why_not=_KERAS + "keras/ipu calls no collective within a replica",
    ),
    Refusal(
        "ops/custom_ops/poprand/random.cc",
        "SeedOp::Creator",
        "Unimplemented",
        "a seed of other numbers than of 32 bits",
        why_not="the Python layer asks for one of 32 bits",
    ),
    Refusal(
        "ops/custom_ops/popnn/norm.cc",
        "GetNormOptions",
        "FailedPrecondition",
        "a negative axis or number of groups",
        why_not="Keras counts axes from the front, and the addons' layers refuse groups that do not divide channels",
    ),
    Refusal(
        "ops/reduction_ops.cc",
        "CreatePoplibsWindowReduction",
        "FailedPrecondition",
        "a pool of windows other than of sums and largest values",
        why_not=_KERAS + "its pools are of those two",
    ),
    Refusal(
        "ops/custom_ops/poputil/fifo.cc",
        "AddWriteUndefToFIFOBuffer",
        "FailedPrecondition",
        "a buffer between stages outside what runs before a pipeline",
        why_not=_PASSES,
    ),
    Refusal(
        "ops/custom_ops/poputil/inter_ipu_copy.cc",
        "InterIpuCopyOp::Creator",
        "FailedPrecondition",
        "a copy between IPUs that does not say which, or of a remote buffer; so does older ipu_inter_copy.cc",
        why_not=_PASSES,
    ),
    Refusal(
        "ops/custom_ops/poputil/remote_parameter.cc",
        "RemoteParameterStoreOp::Creator",
        "FailedPrecondition",
        "state that was shared out over another number of replicas, or lies in no remote buffer",
        why_not=_PASSES,
    ),
    Refusal(
        "ops/custom_ops/poputil/stateful_gradient_accumulate.cc",
        "StatefulGradientAccumulateWithMomentumOp::Allocator",
        "FailedPrecondition",
        "an accumulator without a layout",
        why_not=_PASSES,
    ),
    Refusal(
        "ops/custom_ops/poplar_ops.cc",
        "PoplarOpManager::GetOp",
        "FailedPrecondition",
        "an operation of the driver's that it has no program for; so does hlo_poplar_instruction.cc",
        why_not=_PASSES,
    ),
    Refusal(
        "tools/poplar_replica_groups.cc",
        "PoplarReplicaGroups::FromXlaReplicaGroups",
        "InvalidArgument",
        "groups of replicas that are neither neighbours nor every other",
        why_not="keras/ipu gives the size of groups alone, and the driver makes the groups",
    ),
    Refusal(
        "tools/reduction_util.cc",
        "GetPoplibsReductionOperation",
        "FailedPrecondition",
        "a reduction other than sum, product, smallest, largest, and, or",
        why_not=_KERAS + "tf.reduce_* are made of those",
    ),
    Refusal(
        "tools/util.cc",
        "SetTupleUniqueDeviceSharding",
        "FailedPrecondition",
        "outputs of one call on several IPUs",
        why_not=_PASSES,
    ),
]
