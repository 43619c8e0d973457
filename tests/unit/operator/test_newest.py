from trainium_operator.newest import Newest


def test_what_was_set_longest_ago_is_forgotten() -> None:
    kept: Newest[str, int] = Newest(2)
    kept["a"], kept["b"], kept["a"], kept["c"] = 1, 2, 3, 4
    assert list(kept.items()) == [("a", 3), ("c", 4)]
    assert kept.setdefault("d", 5) == 5
    assert list(kept) == ["c", "d"]
