"""The state machine of a training step: every transition and every refusal, with a fake sink."""

from pathlib import Path

import pytest

from overspill.core.errors import NonFiniteError, OrderError
from overspill.moe.training_step import ALMOST_ZERO
from tests.moe.step_bench import COUNTS, Bench, FakeRule


@pytest.fixture
def at_once() -> Bench:
    """Experts are updated during backward."""
    return Bench(keep=False)


@pytest.fixture
def kept() -> Bench:
    """Gradients are kept until step()."""
    return Bench(keep=True)


@pytest.fixture(params=[False, True], ids=["at once", "kept"])
def either(request: pytest.FixtureRequest) -> Bench:
    return Bench(keep=request.param)


# -- transitions --------------------------------------------------------------------------------


def test_a_complete_gradient_updates_the_experts_during_backward(at_once: Bench) -> None:
    at_once.backward(at_once.forward())
    assert at_once.sink_calls() == [("add", 0, True), ("complete", 0, COUNTS, True)]
    at_once.training.step()
    assert at_once.sink_calls() == [("step", [])]
    assert [at_once.training.optimizer.steps(layer) for layer in range(2)] == [1, 0]


def test_a_kept_gradient_updates_the_experts_in_step(kept: Bench) -> None:
    kept.backward(kept.forward())
    assert kept.sink_calls() == [("add", 0, False), ("complete", 0, COUNTS, False)]
    kept.training.step()
    assert kept.sink_calls() == [("step", [0])]
    assert [kept.training.optimizer.steps(layer) for layer in range(2)] == [1, 0]


def test_micro_batches_are_kept_until_the_last_completes_them(at_once: Bench) -> None:
    for _ in range(2):
        at_once.backward(at_once.forward(), accumulate=True)
    assert at_once.sink_calls() == [("add", 0, False)] * 2
    at_once.backward(at_once.forward())
    assert at_once.sink_calls() == [("add", 0, True), ("complete", 0, COUNTS, True)]
    at_once.training.step()
    assert at_once.sink_calls() == [("step", [])]
    assert at_once.training.optimizer.steps(0) == 1


def test_of_two_forwards_the_second_backward_completes_the_gradient(either: Bench) -> None:
    one, two = either.forward(), either.forward()
    either.backward(two)
    assert either.sink_calls() == [("add", 0, False)]
    either.backward(one)
    complete = not either.rule.keep_gradients
    assert either.sink_calls() == [("add", 0, complete), ("complete", 0, COUNTS, complete)]


def test_a_forward_whose_graph_was_freed_is_not_waited_for(at_once: Bench) -> None:
    freed, used = at_once.forward(), at_once.forward()
    del freed
    at_once.backward(used)
    assert ("complete", 0, COUNTS, True) in at_once.sink_calls()


def test_step_completes_gradients_that_are_still_partial(either: Bench) -> None:
    either.backward(either.forward(1), accumulate=True)
    either.sink_calls()
    either.training.step()
    at_once = not either.rule.keep_gradients
    assert either.sink_calls() == [
        ("complete", 1, None, at_once),
        ("step", [] if at_once else [1]),
    ]
    assert [either.training.optimizer.steps(layer) for layer in range(2)] == [0, 1]


def test_after_step_the_next_step_begins(either: Bench) -> None:
    for _ in range(2):
        either.backward(either.forward())
        either.training.step()
        either.training.zero_grad()
    assert either.training.optimizer.steps(0) == 2


def test_a_backward_after_step_needs_zero_grad_of_its_layer(either: Bench) -> None:
    either.backward(either.forward())
    either.training.step()
    with pytest.raises(OrderError, match="without zero_grad"):
        either.backward(either.forward())
    either.training.drop(0)
    either.backward(either.forward())


def test_a_layer_that_the_optimizer_does_not_have_needs_no_weight_gradients(either: Bench) -> None:
    either.rule.layers = (1,)
    assert not either.training.begin_backward(either.forward(0))
    either.training.step()
    assert either.sink_calls() == [("step", [])]
    assert either.training.optimizer.steps(0) == 0


def test_zero_grad_drops_kept_and_partial_gradients(kept: Bench) -> None:
    kept.backward(kept.forward(0))
    kept.backward(kept.forward(1), accumulate=True)
    kept.sink_calls()
    kept.training.zero_grad()
    assert kept.sink_calls() == [("discard",)]
    kept.training.zero_grad()
    assert kept.sink_calls() == [], "there is nothing to drop"
    kept.backward(kept.forward(0))  # starts over


def test_discard_drops_a_failed_backward(kept: Bench) -> None:
    kept.fail_backward()
    kept.training.discard()
    kept.backward(kept.forward())
    kept.training.step()
    assert kept.training.optimizer.steps(0) == 1


@pytest.mark.parametrize("method", ["add", "complete"])
def test_after_a_gradient_that_is_not_finite_the_step_starts_over(
    method: str, at_once: Bench
) -> None:
    at_once.sink.fail_in = method
    with pytest.raises(NonFiniteError):
        at_once.backward(at_once.forward())
    at_once.sink.fail_in = ""
    at_once.training.zero_grad()
    at_once.backward(at_once.forward())
    at_once.training.step()
    assert at_once.training.optimizer.steps(0) == 1


def test_a_step_that_finds_a_gradient_that_is_not_finite_counts_no_update(either: Bench) -> None:
    either.backward(either.forward())
    either.sink.fail_in = "step"
    with pytest.raises(NonFiniteError):
        either.training.step()
    assert either.training.optimizer.steps(0) == 0
    either.sink.fail_in = ""
    either.backward(either.forward())


def test_step_marks_the_records_as_changed(either: Bench, tmp_path: Path) -> None:
    either.records.mark_saved(tmp_path)
    either.backward(either.forward())
    assert either.records.saved_to == tmp_path
    either.training.step()
    assert either.records.saved_to is None


def test_the_norm_of_kept_gradients_is_shown_once(kept: Bench) -> None:
    training = kept.training
    assert training.waiting_norm(0) is None
    for layer in (1, 0):
        kept.backward(kept.forward(layer))
    assert training.waiting_norm(0) == 3.0
    assert training.waiting_norm(1) == ALMOST_ZERO
    training.step()
    assert training.waiting_norm(0) == ALMOST_ZERO, (
        "as in torch, there is a gradient until zero_grad()"
    )
    training.zero_grad()
    assert training.waiting_norm(0) is None


def test_gradients_that_are_not_kept_add_nothing_to_a_norm(at_once: Bench) -> None:
    at_once.backward(at_once.forward())
    assert at_once.training.waiting_norm(0) == ALMOST_ZERO
    assert at_once.training.waiting_norm(1) is None


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("accumulating", [False, True])
def test_experts_are_updated_at_once_unless_gradients_are_kept_or_accumulated(
    keep: bool, accumulating: bool
) -> None:
    bench = Bench(keep)
    bench.rule.accumulating = accumulating
    assert bench.training.optimizer.updates_at_once == (not keep and not accumulating)
    assert not Bench(attach=False).training.optimizer.updates_at_once


# -- refusals -----------------------------------------------------------------------------------


def test_a_backward_without_optimizer_is_refused() -> None:
    bench = Bench(attach=False)
    with pytest.raises(OrderError, match=r"overspill\.AdamW"):
        bench.backward(bench.forward())


def test_a_second_backward_before_step_is_refused(either: Bench) -> None:
    one = either.forward()
    either.backward(one)
    with pytest.raises(OrderError, match=r"layer 0 got a second backward"):
        either.backward(one)
    either.training.step()  # the first one counts


def test_the_same_graph_twice_is_refused_while_accumulating(either: Bench) -> None:
    one = either.forward()
    either.backward(one, accumulate=True)
    with pytest.raises(OrderError, match=r"opt\.accumulate\(\)"):
        either.backward(one, accumulate=True)


def test_a_graph_from_before_step_is_refused(either: Bench) -> None:
    used, late = either.forward(), either.forward()
    either.backward(used)
    either.training.step()
    with pytest.raises(OrderError, match=r"before step\(\)"):
        either.backward(late)


def test_a_forward_between_backward_and_step_is_refused(either: Bench) -> None:
    either.backward(either.forward())
    with pytest.raises(OrderError, match=r"opt\.step\(\)"):
        either.forward()
    either.forward(1)  # this layer has no gradient yet
    either.training.step()
    either.forward()


def test_a_forward_between_micro_batches_is_allowed(either: Bench) -> None:
    either.backward(either.forward(), accumulate=True)
    either.forward()
    either.training.step()
    assert either.training.optimizer.steps(0) == 1


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_after_a_failed_backward_step_and_backward_are_refused(
    keep: bool, accumulate: bool
) -> None:
    bench = Bench(keep)
    bench.fail_backward(accumulate)
    updated = not keep and not accumulate
    remedy = "load the last checkpoint" if updated else r"opt\.zero_grad\(\)"
    with pytest.raises(OrderError, match=f"failed inside MoE layer 0; .*{remedy}"):
        bench.training.step()
    with pytest.raises(OrderError, match=remedy):
        bench.backward(bench.forward())
    assert bench.training.optimizer.steps(0) == 0
    if not updated:
        bench.training.zero_grad()
        bench.backward(bench.forward())
        bench.training.step()
        assert bench.training.optimizer.steps(0) == 1


def test_zero_grad_after_updates_during_backward_is_refused(at_once: Bench) -> None:
    at_once.backward(at_once.forward())
    with pytest.raises(OrderError, match="max_grad_norm"):
        at_once.training.zero_grad()
    at_once.training.step()
    at_once.training.zero_grad()


def test_zero_grad_after_a_failed_backward_that_may_have_updated_experts_is_refused(
    at_once: Bench,
) -> None:
    at_once.fail_backward()
    with pytest.raises(OrderError, match="updated during"):
        at_once.training.zero_grad()


def test_saving_between_backward_and_step_is_refused_if_experts_are_ahead(
    at_once: Bench, kept: Bench
) -> None:
    for bench in (at_once, kept):
        bench.training.check_between_steps("saved")
        bench.backward(bench.forward())
    with pytest.raises(OrderError, match=r"cannot be saved .* opt\.step\(\)"):
        at_once.training.check_between_steps("saved")
    kept.training.check_between_steps("saved")
    at_once.training.step()
    at_once.training.check_between_steps("saved")


def test_clipping_must_not_be_switched_between_backward_and_step(either: Bench) -> None:
    before = either.rule.keep_gradients
    either.backward(either.forward())
    either.rule.keep_gradients = not before
    with pytest.raises(OrderError, match=r"switch it after step\(\)"):
        either.training.step()
    either.rule.keep_gradients = before
    either.training.step()
    either.training.zero_grad()
    either.rule.keep_gradients = not before
    either.backward(either.forward())
    either.training.step()
    assert either.training.optimizer.steps(0) == 2


def test_the_learning_rate_must_not_change_after_an_update_during_backward(
    at_once: Bench, kept: Bench
) -> None:
    for bench in (at_once, kept):
        bench.backward(bench.forward())
        bench.rule.lr = 0.5
    with pytest.raises(OrderError, match=r"change it after step\(\)"):
        at_once.training.step()
    at_once.rule.lr = 0.1
    at_once.training.step()
    kept.training.step()  # kept gradients use the new rate


# -- optimizers ---------------------------------------------------------------------------------


def test_a_second_optimizer_is_refused_while_the_first_lives(either: Bench) -> None:
    with pytest.raises(OrderError, match="has an optimizer already"):
        either.training.attach(FakeRule(either.training), trained=True)
    either.training.attach(either.rule, trained=True)  # the same one again is none


def test_an_optimizer_that_replaces_a_deleted_one_starts_from_zero(kept: Bench) -> None:
    kept.backward(kept.forward())
    kept.training.step()
    kept.training.zero_grad()
    kept.backward(kept.forward())
    del kept.rule
    assert kept.training.optimizer.rule is None
    kept.sink_calls()
    kept.rule = FakeRule(kept.training)
    kept.training.attach(kept.rule, trained=True)
    assert kept.sink_calls() == [("attach", False), ("discard",), ("reset_states",)]
    assert kept.training.optimizer.steps(0) == 0
    kept.forward()  # the gradient of the old optimizer is gone


def test_the_step_does_not_keep_its_optimizer_alive(either: Bench) -> None:
    assert either.training.optimizer.rule is either.rule
    del either.rule
    assert either.training.optimizer.rule is None


def test_steps_can_be_set_for_a_checkpoint(either: Bench) -> None:
    either.training.optimizer.set_steps(1, 7)
    either.backward(either.forward(1))
    either.training.step()
    assert [either.training.optimizer.steps(layer) for layer in range(2)] == [0, 8]
