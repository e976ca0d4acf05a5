"""Reading a program's text, on one written by hand in libtpu's manner."""

import pytest

from diloco_jax.planning.program import (
    find_collectives,
    group_size,
    hbm_bytes,
    parse,
    sum_collectives,
)

TEXT = """\
HloModule jit__update, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

%start (param_0: bf16[256,512]) -> (bf16[256,512], bf16[1024,512], s32[2]) {
  %param_0 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[1024,512]{1,0:T(8,128)(2,1)} all-gather(%param_0), channel_id=1, replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([2,4]T(1,0)) {'axis_1'}, dimensions={0}
  ROOT %custom-call.1 = (bf16[256,512]{1,0}, bf16[1024,512]{1,0}, s32[2]{0:S(4)}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%done (param_0: bf16[256,512], param_1: bf16[1024,512]) -> bf16[1024,512] {
  %param_0 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = bf16[1024,512]{1,0:T(8,128)(2,1)} parameter(1)
  %all-gather.2 = bf16[1024,512]{1,0:T(8,128)(2,1)} all-gather(%param_0), channel_id=1, replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([2,4]T(1,0)) {'axis_1'}, dimensions={0}
  ROOT %custom-call.2 = bf16[1024,512]{1,0} custom-call(%param_0, %param_1, %all-gather.2), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter (input: f32[1024,128]) -> f32[128,128] {
  %input = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[1024,128]{1,0:T(8,128)} all-reduce(%input), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %zero = s32[]{:T(128)} constant(0)
  ROOT %dynamic-slice.1 = f32[128,128]{1,0:T(8,128)} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={128,128}
}

%slice_of_stack (param_0: bf16[12,256,512], param_1: s32[]) -> bf16[256,512] {
  %param_0 = bf16[12,256,512]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %dynamic-slice.2 = bf16[1,256,512]{2,1,0:T(8,128)(2,1)} dynamic-slice(%param_0, %param_1, %zero, %zero), dynamic_slice_sizes={1,256,512}
  ROOT %bitcast.1 = bf16[256,512]{1,0:T(8,128)(2,1)} bitcast(%dynamic-slice.2)
}

%body (state: (s32[], bf16[12,256,512])) -> (s32[], bf16[12,256,512]) {
  %state = (s32[]{:T(128)}, bf16[12,256,512]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%state), index=0
  %stack = bf16[12,256,512]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %shard = bf16[256,512]{1,0:T(8,128)(2,1)} fusion(%stack, %counter), kind=kLoop, calls=%slice_of_stack
  %started = (bf16[256,512]{1,0}, bf16[1024,512]{1,0}, s32[2]{0:S(4)}) fusion(%shard), kind=kCustom, calls=%start
  %one = bf16[256,512]{1,0} get-tuple-element(%started), index=0
  %two = bf16[1024,512]{1,0} get-tuple-element(%started), index=1
  %gathered = bf16[1024,512]{1,0:T(8,128)(2,1)S(1)} fusion(%one, %two), kind=kCustom, calls=%done
  %squared = bf16[1024,512]{1,0:T(8,128)(2,1)S(1)} multiply(%gathered, %gathered)
  %next = s32[]{:T(128)S(4)} add(%counter, %counter)
  ROOT %out = (s32[]{:T(128)}, bf16[12,256,512]{2,1,0:T(8,128)(2,1)}) tuple(%next, %stack)
}

%condition (state: (s32[], bf16[12,256,512])) -> pred[] {
  %state = (s32[]{:T(128)}, bf16[12,256,512]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %limit = s32[]{:T(128)} constant(12)
  %counter = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %lt = pred[]{:T(512)} compare(%counter, %limit), direction=LT
}

ENTRY %main (p: (s32[], bf16[12,256,512]), g: f32[1024,128]) -> f32[128,128] {
  %p = (s32[]{:T(128)}, bf16[12,256,512]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %g = f32[1024,128]{1,0:T(8,128)} parameter(1)
  %while.1 = (s32[]{:T(128)}, bf16[12,256,512]{2,1,0:T(8,128)(2,1)}) while(%p), condition=%condition, body=%body
  ROOT %fusion.9 = f32[128,128]{1,0:T(8,128)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter
}
"""  # noqa: E501
SPARSE_CORE = """\
HloModule jit__update, is_scheduled=true, num_partitions=4

%product (a: bf16[64,64], b: bf16[64,64]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %b = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %convolution = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} convolution(%a, %b), dim_labels=bf_io->bf
}

%gather_on_sparse_core (shard: bf16[256,512]) -> bf16[1024,512] {
  %shard = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[1024,512]{1,0:T(8,128)(2,1)} all-gather(%shard), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (p: bf16[256,512], q: bf16[64,64]) -> bf16[1024,512] {
  %p = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(0)
  %q = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %started = ((), (), (s32[1]{0:T(128)S(2)})) call-start(), async_execution_thread="sparsecore", to_apply=%gather_on_sparse_core
  %before = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} fusion(%q, %q), kind=kOutput, calls=%product
  %given = ((bf16[256,512]{1,0:T(8,128)(2,1)}), bf16[1024,512]{1,0:T(8,128)(2,1)}) call-update(%started, %p)
  %meanwhile = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} fusion(%before, %q), kind=kOutput, calls=%product
  ROOT %gathered = bf16[1024,512]{1,0:T(8,128)(2,1)} call-done(%given)
}
"""  # noqa: E501
SHARD = 256 * 512 * 2
GATHERED = 4 * SHARD
REDUCED = 1024 * 128 * 4


@pytest.fixture(scope="module")
def program():
    return parse(TEXT)


def test_loops_run_as_often_as_their_condition_says(program):
    assert program.partitions == 8
    assert list(program.executed()) == [
        ("main", 1),
        ("body", 12),
    ]


def test_a_gather_in_pieces_is_one_collective_that_overlaps(program):
    gather, scatter = sum_collectives(program)
    assert (gather.kind, gather.count, gather.overlapping) == ("all-gather", 12, 12)
    assert gather.sent_bytes == gather.overlapping_bytes == 12 * GATHERED * 3 // 4
    assert gather.largest_group == 4
    # An all-reduce of which only a slice is kept.
    assert (scatter.kind, scatter.count) == ("reduce-scatter", 1)
    assert (scatter.overlapping, scatter.largest_group) == (0, 8)
    assert scatter.sent_bytes == REDUCED * 7 // 8


def test_what_a_sparse_core_gathers_counts_and_overlaps():
    (gather,) = sum_collectives(parse(SPARSE_CORE))
    assert (gather.kind, gather.count, gather.overlapping) == ("all-gather", 1, 1)
    assert gather.sent_bytes == GATHERED * 3 // 4
    # Shard and whole, once each; its start and end move nothing.
    assert hbm_bytes(parse(SPARSE_CORE)) == SHARD + GATHERED


def test_an_all_reduce_sends_everything_twice():
    whole = TEXT.replace("ROOT %dynamic-slice.1", "%dynamic-slice.1").replace(
        "dynamic_slice_sizes={128,128}\n",
        "dynamic_slice_sizes={128,128}\n  ROOT %b = f32[128,128]{1,0} "
        "bitcast(%dynamic-slice.1)\n",
        1,
    )
    (reduce,) = [
        c for c in find_collectives(parse(whole)) if c.kind.startswith("all-reduce")
    ]
    assert reduce.sent_bytes == 2 * (REDUCED * 7 // 8)


def test_traffic_is_what_is_read_and_written_in_hbm(program):
    # In the loop a slice of the stack is read, written and gathered, and the counter
    # read three times; what is multiplied lies in fast memory.
    loop = 2 * SHARD + (SHARD + GATHERED) + 3 * 4
    # The reduction reads all, and writes a slice: in the fusion, and by itself.
    reduction = REDUCED + 2 * REDUCED // 8
    assert hbm_bytes(program) == 12 * loop + reduction


def test_one_channel_may_carry_two_kinds():
    permute = (
        "  %permute = bf16[256,512]{1,0:T(8,128)(2,1)} collective-permute(%one), "
        "channel_id=1, source_target_pairs={{0,1},{1,0}}\n"
    )
    both = TEXT.replace("  %squared", permute + "  %squared")
    kinds = {c.kind: c for c in find_collectives(parse(both))}
    assert set(kinds) == {"all-gather", "reduce-scatter", "collective-permute"}
    assert kinds["collective-permute"].sent_bytes == 12 * SHARD


RAGGED = """\
HloModule jit__update, num_partitions=4

ENTRY %main (rows: bf16[1024,256], room: bf16[4096,256], n: s32[4]) -> bf16[1024,256] {
  %rows = bf16[1024,256]{1,0:T(8,128)(2,1)} parameter(0)
  %room = bf16[4096,256]{1,0:T(8,128)(2,1)} parameter(1)
  %n = s32[4]{0:T(128)S(1)} parameter(2)
  %there = bf16[4096,256]{1,0} ragged-all-to-all(%rows, %room, %n, %n, %n, /*index=5*/%n), channel_id=1, replica_groups={{0,1,2,3}}
  %return = bf16[4096,256]{1,0} ragged-all-to-all(%there, %room, %n, %n, %n, /*index=5*/%n), channel_id=1, replica_groups={{0,1,2,3}}
  ROOT %back = bf16[1024,256]{1,0:S(1)} ragged-all-to-all(%return, %rows, %n, %n, %n, /*index=5*/%n), channel_id=1, replica_groups={{0,1,2,3}}
}
"""  # noqa: E501


def test_an_exchange_of_rows_sends_those_that_a_chip_has():
    """Room, and what is sent back, is larger. All have the channel of their shard_map.
    Where the rows that come lie in fast memory, nothing is written to HBM."""
    (found,) = sum_collectives(parse(RAGGED))
    rows = 1024 * 256 * 2
    assert (found.kind, found.count) == ("ragged-all-to-all", 3)
    assert found.sent_bytes == 3 * rows * 3 // 4
    assert found.moved_bytes == 2 * 2 * rows


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=[16,4]<=[8,8]T(1,0), use_global_device_ids=true", 4),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}, x=1", 8),
        (
            "replica_groups=mesh['a'=1,'b'=16,'c'=4], device_ids=([4,16]T(1,0)) {'b'}",
            16,
        ),
        ("source_target_pairs={{0,1}}", 64),
    ],
)
def test_groups_in_every_notation(groups, size):
    assert group_size(f"channel_id=1, {groups}", 64) == size


def test_a_loop_without_a_limit_is_refused(program):
    endless = parse(TEXT.replace("direction=LT", "direction=NE"))
    with pytest.raises(ValueError, match="condition ends in compare"):
        list(endless.executed())


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("HloModule nothing")
