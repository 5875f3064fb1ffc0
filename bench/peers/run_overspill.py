"""Child process of a peer benchmark: Overspill's side, as `bench/train.py` measures it."""

import itertools
from typing import Any

import workload
from peers.measurement import MAX_NORM, Options, Work, child_options, measure
from workload import build, on_gpu_share, optimize

import overspill

BUDGETS: dict[str, dict[str, Any]] = {
    "offload": {"gpu_memory": "12GiB"},
    "gpu": {"gpu_memory": "120GiB"},
}
TINY_BUDGETS: dict[str, dict[str, Any]] = {"offload": {"slots": 2}, "gpu": {"mode": "gpu"}}


def measure_batch(
    model: overspill.GPTMoE, batch: int, norm: float | None, options: Options, budgets: Any
) -> None:
    """Measures a batch with an optimizer of its own. A model has one at a time: the references to
    this one must be gone before the next is made, so they are local to this function."""
    optimizer = optimize(model, norm)
    run = workload.steps(model, optimizer, workload.Work(batch))
    work = Work(options.mode, batch, clip=norm is not None)
    engine = model.overspill
    version = overspill.__version__
    measure("overspill", work, run, options, version, budgets, lambda: on_gpu_share(engine))


def main() -> None:
    options = child_options()
    budgets = (TINY_BUDGETS if options.tiny else BUDGETS)[options.mode]
    model = build(options.config, device=options.device, **budgets)
    offloaded = model.overspill.placement.mode != "gpu"
    if offloaded != (options.mode == "offload"):
        raise RuntimeError(f"mode {options.mode}, but the plan is: {model.overspill.describe()}")
    norms = (None, MAX_NORM) if offloaded else (None,)
    for batch, norm in itertools.product(sorted(options.batches), norms):
        measure_batch(model, batch, norm, options, budgets)
    model.overspill.close()


if __name__ == "__main__":
    main()
