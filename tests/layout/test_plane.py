"""What follows of a plane from where its codes come from, and from its blocks."""

import pytest

from zerocast.layout import FULL, ONE_BLOCK, BlockGrid, Plane, ScaleLayout, Source, grid_of

SCALES = ScaleLayout(BlockGrid(6, 9, 2, 3), row_multiple=4, col_multiple=4)


@pytest.mark.parametrize(
    ("source", "holds"),
    [
        (Source.MASTER, {"is_cast", "is_gathered", "stores_codes"}),
        (Source.TRANSPOSED_MASTER, {"is_cast", "is_transposed", "stores_codes"}),
        (Source.ROWWISE, {"is_derived", "is_transposed", "stores_codes"}),
        (Source.SHARED, set()),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_source_of_codes_says_what_is_done_for_them(source, holds):
    """Whether they are cast, gathered, made afterwards, transposed, or not stored."""
    plane = Plane("columnwise", source, (2, 3), SCALES)
    asked = {"is_cast", "is_gathered", "is_derived", "is_transposed", "stores_codes"}
    assert {name: getattr(plane, name) for name in asked} == {name: name in holds for name in asked}
    codes = ("columnwise_data",) if "stores_codes" in holds else ()
    assert plane.buffers == (*codes, "columnwise_scale_inv")


@pytest.mark.parametrize("source", Source)
@pytest.mark.parametrize("block", [(FULL, FULL), (FULL, 1), (1, FULL), (2, 3)], ids=str)
def test_one_scale_serves_the_codes_and_their_transposed_copy(source, block):
    """Where it is the tensor's only one; every other plane has scales of its own."""
    plane = Plane("columnwise", source, block, SCALES)
    shares = source is Source.ROWWISE and block == (FULL, FULL)
    assert plane.stores_scales is not shares
    assert ("columnwise_scale_inv" in plane.buffers) is not shares


def test_scales_of_rows_columns_and_tensors_are_a_vector():
    """Those of other blocks are stored as their layout says, padding included."""
    for block, shape in (((FULL, FULL), (1,)), ((1, FULL), (6,)), ((FULL, 1), (9,))):
        scales = ScaleLayout(grid_of(6, 9, block))
        assert Plane("rowwise", Source.MASTER, block, scales).scale_shape == shape
    assert Plane("rowwise", Source.MASTER, (2, 3), SCALES).scale_shape == (4, 4)


def test_blocks_span_rows_or_columns_of_the_tensor():
    """Those of the transposed codes, too, whose matrix lies the other way round."""
    for source in Source:
        turned = source in (Source.TRANSPOSED_MASTER, Source.ROWWISE)
        plane = Plane("columnwise", source, (FULL, 1), SCALES)
        assert [plane.grid_dim(0), plane.grid_dim(1)] == ([1, 0] if turned else [0, 1])
        assert [plane.spans(0), plane.spans(1)] == ([False, True] if turned else [True, False])


@pytest.mark.parametrize(("bits", "cols"), [(4, 10), (8, 9)])
def test_rows_end_with_a_whole_byte(bits, cols):
    """An odd number of nibbles is followed by one more; blocks and scales stay as they are."""
    plane = Plane("rowwise", Source.MASTER, (2, 3), SCALES).in_whole_bytes(bits)
    assert plane.grid == BlockGrid(6, cols, 2, 3)
    assert (plane.scales.row_multiple, plane.scales.col_multiple) == (4, 4)
    assert (plane.name, plane.source, plane.block) == ("rowwise", Source.MASTER, (2, 3))


def test_full_blocks_are_as_large_as_the_matrix():
    """In the direction that says so."""
    assert grid_of(6, 9, (FULL, 3)) == BlockGrid(6, 9, 6, 3)
    assert grid_of(6, 9, (2, FULL)) == BlockGrid(6, 9, 2, 9)
    assert grid_of(6, 9, (2, 3)) == BlockGrid(6, 9, 2, 3)


def test_one_block_is_one_element_under_one_scale():
    """Of the plane that stands for a tensor whose scale alone is computed."""
    assert (ONE_BLOCK.name, ONE_BLOCK.grid) == ("rowwise", BlockGrid(1, 1, 1, 1))
    assert ONE_BLOCK.scale_shape == ONE_BLOCK.scales.shape[:1] == (1,)
