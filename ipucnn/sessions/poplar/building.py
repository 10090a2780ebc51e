"""Builds a network for IPUs for one purpose: in its stages, with the SDK's options for it, which models do not save."""

from typing import Optional

from ipucnn.aliases import KerasModel
from ipucnn.sessions.poplar.device import Ipus
from ipucnn.sessions.poplar.model import TRAINING, DeviceModel, ModelSpec, build_for_ipus
from ipucnn.sessions.poplar.options import accumulation_options, pipelining_options
from ipucnn.training.program import BuiltProgram


def build_network(
    ipus: Ipus,
    network: KerasModel,
    purpose: str,
    micro_batch_size: int,
    name: str,
    program: Optional[BuiltProgram] = None,
) -> DeviceModel:
    """Returns a network built for a purpose.

    Args:
        ipus: the IPUs.
        network: the network with its weights.
        purpose: TRAINING, PREDICTION or STATISTICS.
        micro_batch_size: the samples of a micro-batch.
        name: the name of the model.
        program: the Program whose stages and options it has; None: it has no pipeline.
    """
    config = ipus.config
    spec = ModelSpec(
        micro_batch_size=micro_batch_size,
        purpose=purpose,
        precision=config.precision,
        stateless_dropout=config.dropout_layer == "stateless",
        preprocess=ipus.preprocess,
        fused_preprocessing=config.fused_preprocessing,
        rounds_to_nearest=ipus.rounds_stochastically and purpose != TRAINING,
        splits=() if program is None else program.pipeline_splits,
    )
    with ipus.scope():
        built = build_for_ipus(ipus.api, network, spec, name)
        if program is not None:
            _set_options(ipus, built.model, program, training=purpose == TRAINING)
    return built


def _set_options(ipus: Ipus, model: KerasModel, program: BuiltProgram, training: bool) -> None:
    p, config, api = program, ipus.config, ipus.api
    if p.num_stages > 1:
        model.set_pipelining_options(**pipelining_options(api.ipu, p, config, training))
    elif training and p.gradient_accumulation_count > 1:
        model.set_gradient_accumulation_options(**accumulation_options(p, config))
    model.set_infeed_queue_options(prefetch_depth=config.prefetch_depth)
    if training and p.num_replicas > 1 and p.num_stages == 1 and api.reduces_metrics:
        model.set_replication_options(replicated_metric_reduction_method="MEAN")
