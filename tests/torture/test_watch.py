"""What hides records for too long is found, and nothing else is."""

from tests.torture.watch import HIDDEN_S_MAX, Hidden

PLACE = ("p.public.item", 0)


def test_a_partition_that_goes_on_hides_nothing_for_long() -> None:
    hidden = Hidden()
    for second in range(100):
        hidden.see(second, {PLACE: 2 * second}, {PLACE: 2 * second + 1})
    assert hidden.longest_s == 0


def test_the_same_record_hidden_for_long_is_told() -> None:
    hidden = Hidden()
    for second in range(100):
        hidden.see(second, {PLACE: 7}, {PLACE: 10 + second})
    assert hidden.longest_s > HIDDEN_S_MAX
    assert hidden.where == PLACE


def test_time_without_an_answer_is_not_counted() -> None:
    hidden = Hidden()
    hidden.see(0.0, {PLACE: 7}, {PLACE: 8})
    hidden.lose_sight()
    hidden.see(100.0, {PLACE: 7}, {PLACE: 8})
    assert hidden.longest_s == 0
