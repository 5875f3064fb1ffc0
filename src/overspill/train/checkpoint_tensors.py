"""The tensors of a checkpoint, streamed expert by expert to and from safetensors files."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from overspill.core.errors import CheckpointError
from overspill.core.experts import ExpertId
from overspill.models.joint_writing import is_first, shared_writer
from overspill.moe.engine import Engine
from overspill.moe.state_dict import dense_tensors, split_record
from overspill.optim.adamw import AdamW
from overspill.parallel.sharded import local, part_of, whole
from overspill.tiers.safetensors_stream import StreamReader, StreamWriter, TensorSpec

# -- the model -----------------------------------------------------------------------------------


def write_model(path: Path, model: torch.nn.Module, engine: Engine) -> None:
    """Write all weights but those of frozen experts: a run that continues has them already."""
    dense, layers = _names(model)
    trained = trains_experts(model)
    specs = _model_specs(dense, layers if trained else [], engine)
    with shared_writer(path, specs, {"format": "pt"}, engine.ranks) as writer:
        _write_dense(writer, dense, engine)
        if writer is None or not trained:
            return
        record = torch.empty(engine.shape.numel, dtype=engine.dtype)
        for expert in engine.records.ids():
            engine.records.read_weights(expert, record)
            for name, offset, part in _parts(layers, engine, expert, record):
                writer.write_piece(name, offset, part)


@torch.no_grad()
def _write_dense(
    writer: StreamWriter | None, dense: Mapping[str, torch.Tensor], engine: Engine
) -> None:
    """Write the dense tensors, equal or divided among ranks, from the first rank."""
    for name, value in dense.items():
        gathered = whole(value)
        if writer is not None and is_first(engine):
            writer.write(name, gathered)


def read_model(path: Path, model: torch.nn.Module, engine: Engine, experts: bool = True) -> None:
    """Read the weights of a checkpoint. Without `experts` the model's own are right, also if the
    checkpoint has some."""
    read_dense(path, model, engine, experts)
    if not experts:
        return
    _, layers = _names(model)
    with StreamReader(path, advice=_advice(path)) as reader:
        record = torch.empty(engine.shape.numel, dtype=engine.dtype)

        def fill(out: torch.Tensor) -> None:
            out.copy_(record)

        for expert in engine.records.ids():
            for name, offset, part in _parts(layers, engine, expert, record):
                reader.read_piece(name, offset, part)
            engine.records.write_weights(expert, fill)
    for layer in range(engine.n_layers) if engine.can_train else ():
        engine.training.weights_loaded(layer)


def read_dense(path: Path, model: torch.nn.Module, engine: Engine, experts: bool = True) -> None:
    """Read all tensors but the experts, and check that the file has these too; without `experts`
    it may have none."""
    dense, layers = _names(model)
    with StreamReader(path, advice=_advice(path)) as reader:
        specs = _model_specs(dense, layers, engine)
        if not experts and len(reader.specs) == len(dense):
            specs = _specs(dense)
        _check_specs(path, reader, specs)
        with torch.no_grad():
            for name, value in dense.items():
                local(value).copy_(part_of(reader.read(name), value))


def _names(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The dense tensors by their names in a state_dict, and the names of the MoE layers, in order,
    including layers that other ranks have."""
    layers: dict[str, None] = {}  # a layer has one placeholder, or one per weight
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "is_expert_placeholder"):
            layers[name.rpartition(".")[0]] = None
    return dense_tensors(model), list(layers)


def trains_experts(model: torch.nn.Module) -> bool:
    """Whether some experts of an offloaded model are trained."""
    placeholders = (p for p in model.parameters() if hasattr(p, "is_expert_placeholder"))
    return any(parameter.requires_grad for parameter in placeholders)


_PARTS = ("w_in", "w_out", "b_in", "b_out")


def _model_specs(
    dense: Mapping[str, torch.Tensor], layers: list[str], engine: Engine
) -> dict[str, TensorSpec]:
    """Types and shapes of the dense tensors and, for each part of the records, of the stacked
    experts of a layer."""
    specs = _specs(dense)
    for layer in layers:
        for part, size in zip(_PARTS, engine.shape.sizes, strict=False):
            specs[f"{layer}.{part}"] = TensorSpec(engine.dtype, (engine.n_experts, *size))
    return specs


def _specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(value.dtype, tuple(value.shape)) for name, value in tensors.items()}


def _parts(
    layers: list[str], engine: Engine, expert: ExpertId, record: torch.Tensor
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """The parts of an expert's record, with name and offset in the stacked tensors of its layer."""
    layer = layers[engine.layer_map.own[expert.layer]]
    for name, part in zip(_PARTS, split_record(record, engine.shape), strict=False):
        yield f"{layer}.{name}", expert.index * part.numel(), part


# -- the optimizer -------------------------------------------------------------------------------

_DENSE = "dense."


def write_optimizer(path: Path, engine: Engine, optimizer: AdamW) -> None:
    dense = {_DENSE + name: value for name, value in optimizer.dense_state_dict().items()}
    specs = {**expert_state_specs(engine, optimizer), **_specs(dense)}
    with shared_writer(path, specs, {"format": "pt"}, engine.ranks) as writer:
        _write_dense(writer, dense, engine)
        if writer is not None:
            write_expert_states(writer, engine, optimizer)


def read_optimizer(path: Path, engine: Engine, optimizer: AdamW) -> None:
    with StreamReader(path, advice=_advice(path)) as reader:
        # The file says which dense states there are: an optimizer without a step has none.
        dense = {name: spec for name, spec in reader.specs.items() if name.startswith(_DENSE)}
        if len(dense) < len(reader.specs):  # experts may have been frozen since
            optimizer.allocate_expert_states()
        _check_specs(path, reader, {**dense, **expert_state_specs(engine, optimizer)})
        optimizer.load_dense_state_dict(
            {name.removeprefix(_DENSE): reader.read(name) for name in dense}
        )
        read_expert_states(reader, engine, optimizer)


def expert_state_specs(engine: Engine, optimizer: AdamW) -> dict[str, TensorSpec]:
    """One stacked tensor for each layer and each state of the experts."""
    return {
        _state_name(layer, section): TensorSpec(dtype, (engine.n_experts, engine.shape.numel))
        for layer in range(engine.layer_map.n_layers)
        for section, dtype in optimizer.expert_sections()
    }


def write_expert_states(writer: StreamWriter, engine: Engine, optimizer: AdamW) -> None:
    for expert, section, piece in _states(engine, optimizer):
        optimizer.read_expert_state(expert, section, piece)
        offset = expert.index * piece.numel()
        layer = engine.layer_map.own[expert.layer]
        writer.write_piece(_state_name(layer, section), offset, piece)


def read_expert_states(reader: StreamReader, engine: Engine, optimizer: AdamW) -> None:
    for expert, section, piece in _states(engine, optimizer):
        offset = expert.index * piece.numel()
        layer = engine.layer_map.own[expert.layer]
        reader.read_piece(_state_name(layer, section), offset, piece)
        optimizer.write_expert_state(expert, section, piece)


def _states(engine: Engine, optimizer: AdamW) -> Iterator[tuple[ExpertId, str, torch.Tensor]]:
    """Every state of every expert, with a buffer for it. Buffers are reused."""
    for section, dtype in optimizer.expert_sections():
        piece = torch.empty(engine.shape.numel, dtype=dtype)
        for expert in engine.records.ids():
            yield expert, section, piece


def _state_name(layer: int, section: str) -> str:
    return f"experts.{layer}.{section}"


def _check_specs(path: Path, reader: StreamReader, wanted: Mapping[str, TensorSpec]) -> None:
    for name, spec in wanted.items():
        there = reader.specs.get(name)
        if there != spec:
            found = "no such tensor" if there is None else f"{there.dtype} {list(there.shape)}"
            raise CheckpointError(
                f"{path}: {name} should be {spec.dtype} {list(spec.shape)}, found {found}; "
                "resume with the settings it was written with, or give another --out"
            )
    foreign = sorted(reader.specs.keys() - wanted.keys())
    if foreign:
        raise CheckpointError(
            f"{path} holds {foreign[0]}, which this model does not have; resume with the settings "
            "it was written with, or give another --out"
        )


def _advice(file: Path) -> str:
    return f"remove {file.parent} and resume from the checkpoint before it"
