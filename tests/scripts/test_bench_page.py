"""scripts/bench_page.py: the tables of docs/benchmarks.md are those of the records."""

import bench_page


def test_the_tables_of_the_page_are_made_from_the_records():
    """``python scripts/bench_page.py --write`` would change nothing."""
    assert bench_page.page() == bench_page.PAGE.read_text()
