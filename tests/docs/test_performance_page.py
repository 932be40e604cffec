"""docs/throughput.svg shows what docs/performance.md says."""

from tests.throughput_bars import PAGE, picture, tables


def test_every_row_of_the_tables_is_in_the_picture():
    page = PAGE.read_text(encoding="utf-8")
    drawn = tables(page)
    lines = [line for line in page.splitlines() if line.startswith(("| prefill,", "| decode,"))]
    assert len(drawn) == 2
    assert sum(len(table.rows) for table in drawn) == len(lines)
    for table in drawn:
        assert len(table.names) == 3
        assert all(len(figures) == len(table.names) for figures in table.rows.values())


def test_the_picture_is_drawn_from_the_tables():
    assert PAGE.with_name("throughput.svg").read_text(encoding="utf-8") == picture()
