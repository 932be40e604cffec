"""docs/throughput.svg shows what docs/performance.md says."""

from tests.throughput_bars import PAGE, picture, table


def test_every_row_of_the_table_is_in_the_picture():
    page = PAGE.read_text(encoding="utf-8")
    names, rows = table(page)
    assert len(names) == 3
    assert len(rows) == sum(line.startswith(("| prefill,", "| decode,")) for line in page.splitlines())
    assert all(len(figures) == len(names) for figures in rows.values())


def test_the_picture_is_drawn_from_the_table():
    assert PAGE.with_name("throughput.svg").read_text(encoding="utf-8") == picture()
