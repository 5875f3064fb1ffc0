from dataclasses import replace

from overspill.train.summary import Summary

DONE = Summary(
    out="runs/a", steps=7, interrupted=False, loss=1.25, eval_loss=None, tokens_per_s=1234.5,
    seconds=1.0, checkpoint=None, placement="mode host", bytes_by_tier={}, host_peak=2**30,
    gpu_peak=0,
)  # fmt: skip


def test_the_end_of_a_run_in_words() -> None:
    assert DONE.lines() == [
        "done at step 7: loss 1.2500, 1,234 tok/s",
        "mode host; host memory peak 1.0 GiB",
        "run folder: runs/a",
    ]


def test_a_trained_model_can_be_tried() -> None:
    saved = replace(DONE, checkpoint="runs/a/checkpoints/step-00000007")
    assert saved.lines()[-1] == "to try it: overspill chat runs/a"


def test_an_interrupted_run_says_how_to_continue() -> None:
    stopped = replace(DONE, interrupted=True, eval_loss=2.0, gpu_peak=2**31)
    first, second, *_, last = stopped.lines()
    assert first == "stopped at step 7: loss 1.2500, eval loss 2.0000, 1,234 tok/s"
    assert second.endswith("GPU memory peak 2.0 GiB")
    assert last == "to continue: overspill train --resume --out runs/a"


def test_commands_quote_folders() -> None:
    spaced = replace(DONE, out="my runs", checkpoint="my runs/checkpoints/step-00000007")
    assert spaced.lines()[-1] == "to try it: overspill chat 'my runs'"
    stopped = replace(spaced, interrupted=True)
    assert stopped.lines()[-1] == "to continue: overspill train --resume --out 'my runs'"
