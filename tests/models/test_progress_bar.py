from overspill.models.progress_bar import TerminalProgress


def test_a_bar_lives_from_the_first_report_to_the_last() -> None:
    show = TerminalProgress()
    for done in (1, 5, 10):
        show("taking memory", done, 10)
        assert show.shown == (done < 10)
    show("filling the store", 1, 2)
    assert show.shown
    show.stop()
    assert not show.shown
