from pathlib import Path

from tests.soak.journal import Journal, of_pasts, read_journal


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    journal = Journal(file)
    journal.append(step=1)
    journal.append(step=2, deletes={"users": [3]})
    assert read_journal(file) == [{"step": 1}, {"step": 2, "deletes": {"users": [3]}}]
    journal.close()


def test_half_a_line_was_never_written_and_the_next_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"step": 1}\n{"st')
    assert read_journal(file) == [{"step": 1}]
    journal = Journal(file)
    journal.append(step=2)
    journal.close()
    assert read_journal(file) == [{"step": 1}, {"step": 2}]


def test_there_may_be_none(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "none") == []


def test_what_came_before_a_directory_was_put_back_by_hand_is_another_past() -> None:
    lines = [{"history": "h", "unix_ns": at, "version": at} for at in (1, 5, 6, 9)]
    assert [line["history"] for line in of_pasts(lines, [5, 8])] == ["h/0", "h/1", "h/1", "h/2"]
    assert [line["version"] for line in of_pasts(lines, [5, 8])] == [1, 5, 6, 9]
    assert {line["history"] for line in of_pasts(lines, [])} == {"h/0"}
