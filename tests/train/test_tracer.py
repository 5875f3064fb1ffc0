from overspill.trace.recorder import Recorder
from overspill.train.tracer import Tracer


def test_the_tracer_records_the_first_steps_of_each_interval() -> None:
    recorder = Recorder()
    tracer = Tracer(recorder, every=4, count=2)
    traced = []
    for step in range(9):
        tracer.before_step(step)
        if recorder.enabled:
            traced.append(step)
            with recorder.span("upload", f"step {step}"):
                pass
        tracer.after_step(step)
    assert traced == [0, 1, 4, 5, 8]
    assert [span.name for span in recorder.spans()] == ["step 8"]
    busy = tracer.busy()
    assert busy is not None
    assert 0 < busy["upload"] <= 1
