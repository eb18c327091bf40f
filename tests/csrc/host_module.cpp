// The host arithmetic of the library as a Python module, which only the tests use. It contains no logic of its own.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "../../csrc/attention/index/bias_blocks.h"
#include "../../csrc/attention/index/dq_layout.h"
#include "../../csrc/attention/index/dq_order.h"
#include "../../csrc/attention/index/list_iterator.h"
#include "../../csrc/attention/index/query_iterator.h"
#include "../../csrc/attention/index/query_loop.h"
#include "../../csrc/attention/index/tile_order.h"
#include "../../csrc/attention/index/tile_visibility.h"
#include "../../csrc/attention/index/transposed.h"
#include "../../csrc/attention/params.h"
#include "../../csrc/attention/plan.h"
#include "../../csrc/attention/pre_post/lse_delta.h"
#include "../../csrc/attention/problem.h"
#include "../../csrc/attention/sm80/config.h"
#include "../../csrc/attention/sm90/schedule.h"
#include "../../csrc/attention/workspace.h"
#include "../../csrc/common/overlap.h"
#include "../../csrc/decoding/params.h"
#include "../../csrc/decoding/plan.h"
#include "../../csrc/layer_norm/config.h"
#include "../../csrc/layer_norm/keep.h"

namespace py = pybind11;

namespace flashbwd {
namespace {

std::tuple<int32_t, int32_t> pair_of(BlockRange range) { return {range.begin, range.end}; }
std::tuple<int32_t, int32_t, int32_t> triple_of(WorkTileIndex tile) { return {tile.batch, tile.head, tile.key_block}; }

// The fields of a work tile that the iterators read.
template <bool kByHeads_, bool kStaggers_>
struct LoopTile {
  static constexpr bool kByHeads = kByHeads_, kStaggers = kStaggers_;
  int32_t first_index, iterations, first_head, end_head, first_block, past_block;
  BlockRange query_range;
  bool descending;
};

using Position = std::tuple<int32_t, int32_t>;  // query head and query block

// The positions that three iterators visit: the default one, the one that reads the tile again, and the small one.
template <bool kByHeads, bool kStaggers>
std::array<std::vector<Position>, 3> positions(int32_t first_index, Position heads, Position blocks,
                                               int32_t first_block, bool descending) {
  const auto [first_head, end_head] = heads;
  const BlockRange range = {std::get<0>(blocks), std::get<1>(blocks)};
  const LoopTile<kByHeads, kStaggers> tile = {
      first_index, range.size() * (end_head - first_head),   first_head, end_head,
      first_block, descending ? range.begin - 1 : range.end, range,      descending};
  std::array<std::vector<Position>, 3> found;
  QueryIterator rereading(tile);
  SmallQueryIterator small(tile);
  for (QueryIterator step(tile); step.index < step.end; step.advance(tile)) {
    found[0].emplace_back(step.head(), step.query_block());
    found[1].emplace_back(rereading.head(), rereading.query_block());
    found[2].emplace_back(small.head(), small.query_block());
    rereading.advance_rereading(tile);
    small.advance(tile);
  }
  return found;
}

struct ListedTile : ListedLoop<true> {
  int32_t first_index, iterations, first_head;
};

// The positions that the iterator of a block mask visits. An entry has a query block, the head within the KV head, the
// tile of bits, and the numbers of adds before and after (in one number, as in a tensor).
std::vector<std::array<int32_t, 6>> listed_positions(int32_t first_index, int32_t first_head,
                                                     const std::vector<std::array<int32_t, 4>>& entries,
                                                     bool backwards) {
  std::vector<QueryBlockEntry> list(entries.size());
  static_assert(sizeof(QueryBlockEntry) == sizeof(entries[0]), "an entry is a row of an int32 tensor");
  if (!list.empty()) std::memcpy(list.data(), entries.data(), list.size() * sizeof(list[0]));
  ListedTile tile;
  tile.entries = backwards && !list.empty() ? &list.back() : list.data();
  tile.entry_step = backwards ? -1 : 1;
  tile.first_index = first_index;
  tile.iterations = static_cast<int32_t>(list.size());
  tile.first_head = first_head;
  std::vector<std::array<int32_t, 6>> found;
  SmallListIterator<ListedTile> small(tile);
  for (ListIterator step(tile); step.index < step.end; step.advance(tile), small.advance_rereading(tile)) {
    if (std::array{small.index, small.head(), small.query_block()} !=
        std::array{step.index, step.head(), step.query_block()}) {
      throw std::logic_error("the iterators differ");
    }
    found.push_back({step.index, step.head(), step.query_block(), step.entry.bits, step.entry.adds_before(),
                     step.entry.adds_after()});
  }
  return found;
}

template <int kBlockM>
uint32_t columns_that_see_of(const Visibility& v, int32_t first_key, int32_t first_query, int32_t row, int32_t column) {
  return columns_that_see<kBlockM>(TileVisibility(v, first_key, first_query), row, column);
}

std::optional<std::vector<int64_t>> strides_of_like(const std::vector<int64_t>& sizes,
                                                    const std::vector<int64_t>& strides) {
  TensorDesc like;
  like.dim = static_cast<int32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), like.sizes.begin());
  std::copy(strides.begin(), strides.end(), like.strides.begin());
  std::array<int64_t, TensorDesc::kMaxDims> found{};
  if (!strides_without_gaps(like, &found)) return std::nullopt;
  return std::vector<int64_t>(found.begin(), found.begin() + like.dim);
}

TensorDesc view_of(int64_t address, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                   DType dtype) {
  TensorDesc view;
  view.data = reinterpret_cast<void*>(address);
  view.dtype = dtype;
  view.dim = static_cast<int32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), view.sizes.begin());
  std::copy(strides.begin(), strides.end(), view.strides.begin());
  return view;
}

void bind_problem(py::module_& m) {
  m.def("strides_without_gaps", &strides_of_like);
  py::class_<TensorDesc>(m, "TensorDesc");
  m.def("view_of", &view_of);
  m.def("share_memory", &share_memory);
  m.def("elements_overlap", &elements_overlap);
  py::enum_<CausalAlignment>(m, "CausalAlignment")
      .value("kNone", CausalAlignment::kNone)
      .value("kBottomRight", CausalAlignment::kBottomRight)
      .value("kTopLeft", CausalAlignment::kTopLeft);
  py::enum_<DropoutLayout>(m, "DropoutLayout")
      .value("kFlash", DropoutLayout::kFlash)
      .value("kEfficient32", DropoutLayout::kEfficient32)
      .value("kEfficient64", DropoutLayout::kEfficient64);
  py::enum_<DType>(m, "DType")
      .value("kFloat16", DType::kFloat16)
      .value("kBFloat16", DType::kBFloat16)
      .value("kFloat32", DType::kFloat32)
      .value("kFloat64", DType::kFloat64)
      .value("kInt32", DType::kInt32)
      .value("kInt64", DType::kInt64)
      .value("kUInt64", DType::kUInt64)
      .value("kUInt8", DType::kUInt8)
      .value("kBool", DType::kBool);
  py::class_<AttentionProblem>(m, "AttentionProblem")
      .def(py::init<>())
      .def_readwrite("dtype", &AttentionProblem::dtype)
      .def_readwrite("softcap", &AttentionProblem::softcap)
      .def_readwrite("dropout_p", &AttentionProblem::dropout_p)
      .def_readwrite("dropout_layout", &AttentionProblem::dropout_layout)
      .def_readwrite("has_bias", &AttentionProblem::has_bias)
      .def_readwrite("need_dbias", &AttentionProblem::need_dbias)
      .def_readwrite("bias_dtype", &AttentionProblem::bias_dtype)
      .def_readwrite("bias_broadcast_batch", &AttentionProblem::bias_broadcast_batch)
      .def_readwrite("bias_broadcast_head", &AttentionProblem::bias_broadcast_head)
      .def_readwrite("bias_broadcast_row", &AttentionProblem::bias_broadcast_row)
      .def_readwrite("bias_broadcast_col", &AttentionProblem::bias_broadcast_col)
      .def_readwrite("bias_has_rows", &AttentionProblem::bias_has_rows)
      .def_readwrite("bias_of_keys", &AttentionProblem::bias_of_keys)
      .def_readwrite("has_key_mask", &AttentionProblem::has_key_mask)
      .def_readwrite("has_alibi", &AttentionProblem::has_alibi)
      .def_readwrite("has_block_mask", &AttentionProblem::has_block_mask)
      .def_readwrite("has_score_mod", &AttentionProblem::has_score_mod)
      .def_readwrite("block_mask_covers", &AttentionProblem::block_mask_covers)
      .def_readwrite("block_mask_queries_seen", &AttentionProblem::block_mask_queries_seen)
      .def_readwrite("list_block_m", &AttentionProblem::block_m)
      .def_readwrite("list_block_n", &AttentionProblem::block_n)
      .def_readwrite("has_sink", &AttentionProblem::has_sink)
      .def_readwrite("deterministic", &AttentionProblem::deterministic)
      .def_readwrite("tf32", &AttentionProblem::tf32)
      .def_readwrite("aligned_16", &AttentionProblem::aligned_16)
      .def_readwrite("dq_aligned_16", &AttentionProblem::dq_aligned_16)
      .def_readwrite("dq_dtype", &AttentionProblem::dq_dtype)
      .def_readwrite("backend", &AttentionProblem::backend)
      .def_readwrite("varlen", &AttentionProblem::varlen)
      .def_readwrite("batch", &AttentionProblem::batch)
      .def_readwrite("heads", &AttentionProblem::heads)
      .def_readwrite("heads_kv", &AttentionProblem::heads_kv)
      .def_readwrite("head_dim", &AttentionProblem::head_dim)
      .def_readwrite("head_dim_v", &AttentionProblem::head_dim_v)
      .def_readwrite("seqlen_q", &AttentionProblem::seqlen_q)
      .def_readwrite("seqlen_k", &AttentionProblem::seqlen_k)
      .def_readwrite("total_q", &AttentionProblem::total_q)
      .def_readwrite("total_k", &AttentionProblem::total_k)
      .def_readwrite("seqlens_q", &AttentionProblem::seqlens_q)
      .def_readwrite("seqlens_k", &AttentionProblem::seqlens_k)
      .def_readwrite("window_left", &AttentionProblem::window_left)
      .def_readwrite("window_right", &AttentionProblem::window_right)
      .def_readwrite("has_seqused", &AttentionProblem::has_seqused);
}

// The description of a tensor on the first GPU. The memory may be anywhere, because nothing reads it.
TensorDesc on_gpu(int64_t address, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                  DType dtype) {
  TensorDesc view = view_of(address, sizes, strides, dtype);
  view.device.type = DeviceType::kCUDA;
  view.defined = true;
  return view;
}

void bind_arguments(py::module_& m) {
  m.def("on_gpu", &on_gpu);
  py::class_<AttentionArguments> arguments(m, "AttentionArguments");
  arguments.def(py::init<>())
      .def_readwrite("dout", &AttentionArguments::dout)
      .def_readwrite("q", &AttentionArguments::q)
      .def_readwrite("k", &AttentionArguments::k)
      .def_readwrite("v", &AttentionArguments::v)
      .def_readwrite("out", &AttentionArguments::out)
      .def_readwrite("softmax_lse", &AttentionArguments::softmax_lse)
      .def_readwrite("softmax_scale", &AttentionArguments::softmax_scale)
      .def_readwrite("block_lists", &AttentionArguments::block_lists)
      .def_readwrite("block_entries", &AttentionArguments::block_entries)
      .def_readwrite("block_bits", &AttentionArguments::block_bits)
      .def_readwrite("block_mask_covers", &AttentionArguments::block_mask_covers)
      .def_readwrite("block_m", &AttentionArguments::block_m)
      .def_readwrite("block_n", &AttentionArguments::block_n)
      .def_readwrite("dq", &AttentionArguments::dq)
      .def_readwrite("dk", &AttentionArguments::dk)
      .def_readwrite("dv", &AttentionArguments::dv)
      .def_readwrite("workspace", &AttentionArguments::workspace);
  const auto bind = [&](const char* name, unsigned, auto member) { arguments.def_readwrite(name, member); };
  for_each_tensor<AttentionArguments>(bind);
  for_each_scalar<AttentionArguments>(bind);
}

void bind_workspace(py::module_& m) {
  py::class_<WorkspaceRequest>(m, "WorkspaceRequest")
      .def(py::init<>())
      .def_readwrite("accumulator", &WorkspaceRequest::accumulator)
      .def_readwrite("zero_accumulator", &WorkspaceRequest::zero_accumulator)
      .def_readwrite("dq_blocks", &WorkspaceRequest::dq_blocks)
      .def_readwrite("dq_permuted", &WorkspaceRequest::dq_permuted)
      .def_readwrite("semaphore_bytes", &WorkspaceRequest::semaphore_bytes)
      .def_readwrite("delta_rows", &WorkspaceRequest::delta_rows)
      .def_readwrite("partial_bytes", &WorkspaceRequest::partial_bytes);
  py::class_<WorkspaceLayout>(m, "WorkspaceLayout")
      .def_readonly("has_accumulator", &WorkspaceLayout::has_accumulator)
      .def_readonly("row_stride", &WorkspaceLayout::row_stride)
      .def_readonly("dq_blocks", &WorkspaceLayout::dq_blocks)
      .def_readonly("dq_permuted", &WorkspaceLayout::dq_permuted)
      .def_readonly("accumulator_offset", &WorkspaceLayout::accumulator_offset)
      .def_readonly("accumulator_bytes", &WorkspaceLayout::accumulator_bytes)
      .def_readonly("zero_accumulator", &WorkspaceLayout::zero_accumulator)
      .def_readonly("semaphore_offset", &WorkspaceLayout::semaphore_offset)
      .def_readonly("semaphore_bytes", &WorkspaceLayout::semaphore_bytes)
      .def_readonly("delta_offset", &WorkspaceLayout::delta_offset)
      .def_readonly("delta_bytes", &WorkspaceLayout::delta_bytes)
      .def_readonly("partial_offset", &WorkspaceLayout::partial_offset)
      .def_readonly("partial_bytes", &WorkspaceLayout::partial_bytes)
      .def_readonly("lengths_offset", &WorkspaceLayout::lengths_offset)
      .def_readonly("lengths_bytes", &WorkspaceLayout::lengths_bytes)
      .def_readonly("bytes", &WorkspaceLayout::bytes);
  m.def("plan_workspace", &plan_workspace);
  py::class_<LseDelta>(m, "LseDelta")
      .def(py::init([](bool varlen, int64_t batch, int64_t heads, int64_t seqlen_q, int64_t total_q) {
        return LseDelta::make(nullptr, varlen, batch, heads, seqlen_q, total_q);
      }))
      .def_property_readonly("delta_offset", [](const LseDelta& s) { return s.delta - s.lse_log2; })
      .def("index", &LseDelta::index);
  m.def("dq_row_offset", &dq_row_offset);
  m.def("dq_block_offset", &dq_block_offset);
  m.def("permuted_offset", &permuted_offset);
  m.def("permuted_column", &permuted_column);
}

// Plans for GPUs that this machine need not have.
void bind_plan(py::module_& m) {
  py::class_<DeviceInfo>(m, "DeviceInfo")
      .def(py::init<>())
      .def_readwrite("usable", &DeviceInfo::usable)
      .def_readwrite("why_not", &DeviceInfo::why_not)
      .def_readwrite("cc_major", &DeviceInfo::cc_major)
      .def_readwrite("cc_minor", &DeviceInfo::cc_minor)
      .def_readwrite("sm_count", &DeviceInfo::sm_count)
      .def_readwrite("smem_per_block", &DeviceInfo::smem_per_block)
      .def_readwrite("l2_bytes", &DeviceInfo::l2_bytes)
      .def_readwrite("has_attention_sm90", &DeviceInfo::has_attention_sm90)
      .def_readwrite("has_attention_sm80", &DeviceInfo::has_attention_sm80)
      .def_readwrite("has_attention_short", &DeviceInfo::has_attention_short);
  py::class_<AttentionPlan>(m, "AttentionPlan")
      .def_readonly("backend", &AttentionPlan::backend)
      .def_readonly("config", &AttentionPlan::config)
      .def_readonly("block_m", &AttentionPlan::block_m)
      .def_readonly("block_n", &AttentionPlan::block_n)
      .def_readonly("splits", &AttentionPlan::splits)
      .def_readonly("schedule", &AttentionPlan::schedule)
      .def_readonly("deterministic", &AttentionPlan::deterministic)
      .def_readonly("cooperative", &AttentionPlan::cooperative)
      .def_readonly("workspace", &AttentionPlan::workspace)
      .def_property_readonly("sm90", [](const AttentionPlan& plan) { return plan.sm90.schedule; })
      .def_readonly("refusals", &AttentionPlan::refusals);
  m.def(
      "sm80_launch",
      [](const AttentionPlan& plan) {
        const sm80::Tile& tile = sm80::kTiles[plan.config];
        return py::make_tuple(tile.shared_bytes() + sm80::kAlignmentBytes, tile.threads());
      },
      "Of a plan of this family: bytes of shared memory and threads of a CTA, and whether its tile has every feature.");
  m.def(
      "sm90_needs",
      [](const AttentionPlan& plan) {
        const uint32_t features = sm90::kTiles[plan.config].features;
        return py::make_tuple((features & sm90::feature::kBlockMask) != 0, (features & sm90::feature::kGenerated) != 0);
      },
      "Of a plan of this family: whether its kernel reads block lists, and whether it is compiled at run time.");
  m.def(
      "short_launch",
      [](const AttentionPlan& plan) {
        return py::make_tuple(plan.short_sequences.shared.bytes, plan.short_sequences.slots);
      },
      "Of a plan of this family: bytes of shared memory of a CTA, and CTAs per KV head.");
  m.def("plan_of_arguments", [](AttentionArguments arguments, const DeviceInfo& device) {
    arguments.plan_only = true;
    return to_json(plan_attention(check_attention(arguments), device));
  });
  m.def("plan_attention", [](AttentionProblem problem, const DeviceInfo& device) {
    problem.device.type = DeviceType::kCUDA;
    return plan_attention(problem, device);
  });
}

void bind_visibility(py::module_& m) {
  py::class_<Visibility>(m, "Visibility")
      .def_readonly("seqlen_q", &Visibility::seqlen_q)
      .def_readonly("seqlen_k", &Visibility::seqlen_k)
      .def_readonly("lo", &Visibility::lo)
      .def_readonly("hi", &Visibility::hi)
      .def("visible", &Visibility::visible)
      .def("full", &Visibility::full);
  m.def("make_visibility", &make_visibility);
  m.def("transposed", &transposed);
  m.def("key_blocks", [](const Visibility& v, int32_t block, int32_t block_m, int32_t block_n) {
    return pair_of(key_blocks(v, block, block_m, block_n));
  });
  m.def("query_blocks", [](const Visibility& v, int32_t block, int32_t block_m, int32_t block_n) {
    return pair_of(query_blocks(v, block, block_m, block_n));
  });
  m.def("sees_a_key", &sees_a_key);
  m.def("interior_query_blocks", [](const Visibility& v, int32_t block, int32_t block_m, int32_t block_n) {
    return pair_of(interior_query_blocks(v, block, block_m, block_n));
  });
}

void bind_order(py::module_& m) {
  m.def("columns_that_see_64", &columns_that_see_of<64>);
  m.def("columns_that_see_128", &columns_that_see_of<128>);
  m.def("query_positions", &positions<false, false>);
  m.def("query_positions_by_heads", &positions<true, false>);
  m.def("query_positions_staggered", &positions<false, true>);
  m.def("listed_positions", &listed_positions);
  m.def("split_query_loop", [](int32_t steps, int32_t split, int32_t num_splits) {
    return pair_of(split_query_loop(steps, split, num_splits));
  });
  m.def("heads_per_pass", &heads_per_pass);
  py::class_<QueryLoopPosition>(m, "QueryLoopPosition")
      .def(py::init<int32_t, int32_t, int32_t>())
      .def("advance", &QueryLoopPosition::advance)
      .def_readonly("head", &QueryLoopPosition::head)
      .def_readonly("tile", &QueryLoopPosition::tile);
  m.def("split_count", &split_count);
  m.def("staggered_start", &staggered_start);
  m.def("adds_before_ascending", [](const Visibility& v, int32_t m, int32_t n, int32_t block_m, int32_t block_n) {
    return adds_before_ascending(key_blocks(v, m, block_m, block_n), n);
  });
  m.def("adds_before_descending", [](const Visibility& v, int32_t m, int32_t n, int32_t block_m, int32_t block_n) {
    return adds_before_descending(key_blocks(v, m, block_m, block_n), n);
  });
  py::class_<TilesInWave>(m, "TilesInWave")
      .def(py::init([](int32_t before, int32_t rank, int32_t size) { return TilesInWave{before, rank, size}; }))
      .def_readonly("before", &TilesInWave::before)
      .def_readonly("rank", &TilesInWave::rank)
      .def_readonly("size", &TilesInWave::size);
  m.def("tiles_in_wave", &tiles_in_wave);
  m.def("adds_before_in_ring", &adds_before_in_ring);
  m.def("adds_before_in_pairs", &adds_before_in_pairs);
  m.def("heads_in_l2", &heads_in_l2);
  m.def("heads_at_once", &heads_at_once);
  m.def("dense_work_tile", [](int64_t index, int32_t batch, int32_t heads, int32_t num_key_blocks, int64_t head_group) {
    return triple_of(dense_work_tile(index, batch, heads, num_key_blocks, head_group));
  });
  m.def("dense_work_tile", [](int64_t index, int32_t batch, int32_t heads, int32_t num_key_blocks, int64_t head_group,
                              int64_t last_group) {
    return triple_of(dense_work_tile(index, batch, heads, num_key_blocks, head_group, last_group));
  });
  m.def("varlen_work_tiles", &varlen_work_tiles);
  m.def("varlen_work_tile", [](int64_t index, const std::vector<int32_t>& cu_seqlens_k, int32_t heads, int32_t block_n,
                               int64_t head_group, int32_t list_blocks) {
    const auto batch = static_cast<int32_t>(cu_seqlens_k.size()) - 1;
    const auto heads_of_list = [&](int32_t blocks) { return at_least(head_group, list_blocks / at_least(blocks, 1)); };
    return triple_of(varlen_work_tile(index, cu_seqlens_k.data(), batch, heads, block_n, heads_of_list));
  });
}

void bind_sm90_schedule(py::module_& m) {
  using sm90::Schedule;
  py::enum_<sm90::Dispatch>(m, "Dispatch")
      .value("kDynamic", sm90::Dispatch::kDynamic)
      .value("kStatic", sm90::Dispatch::kStatic);
  py::enum_<sm90::DqOrder>(m, "DqOrder")
      .value("kUnordered", sm90::DqOrder::kUnordered)
      .value("kFirstAndLast", sm90::DqOrder::kFirstAndLast)
      .value("kOrdered", sm90::DqOrder::kOrdered);
  py::class_<Schedule>(m, "Sm90Schedule")
      .def_readonly("dispatch", &Schedule::dispatch)
      .def_readonly("key_blocks", &Schedule::key_blocks)
      .def_readonly("query_blocks", &Schedule::query_blocks)
      .def_readonly("mirrored_pairs", &Schedule::mirrored_pairs)
      .def_readonly("gqa_splits", &Schedule::gqa_splits)
      .def_readonly("tiles_per_head", &Schedule::tiles_per_head)
      .def_readonly("heads_per_group", &Schedule::heads_per_group)
      .def_readonly("key_blocks_per_group", &Schedule::key_blocks_per_group)
      .def_readonly("reversed", &Schedule::reversed)
      .def_readonly("last_group", &Schedule::last_group)
      .def_readonly("work_tiles", &Schedule::work_tiles)
      .def_readonly("heads_outermost", &Schedule::heads_outermost)
      .def_readonly("wave_size", &Schedule::wave_size)
      .def_readonly("query_blocks_apart", &Schedule::query_blocks_apart)
      .def_readonly("fetches_early", &Schedule::fetches_early)
      .def_readonly("dq_order", &Schedule::dq_order)
      .def_readonly("last_add_writes_dq", &Schedule::last_add_writes_dq)
      .def_readonly("batches_innermost", &Schedule::batches_innermost)
      .def_readonly("preprocess_ctas", &Schedule::preprocess_ctas);
}

void bind_bias_blocks(py::module_& m) {
  py::class_<BiasSharers>(m, "BiasSharers")
      .def(py::init([](bool batches, bool heads, int32_t num_heads) { return BiasSharers{batches, heads, num_heads}; }))
      .def("adds_before", &BiasSharers::adds_before)
      .def("plane", &BiasSharers::plane);
  m.def("element_of_bias_block", &element_of_bias_block);
  m.def("bias_key_group_elements", &bias_key_group_elements);
  m.def("bias_plane_elements", &bias_plane_elements);
  m.def("with_batches_innermost", [](std::tuple<int32_t, int32_t, int32_t> tile, int32_t batches, int32_t heads) {
    const auto [batch, head, key_block] = tile;
    return triple_of(with_batches_innermost({batch, head, key_block}, batches, heads));
  });
}

void bind_layer_norm(py::module_& m) {
  using namespace layer_norm;
  py::class_<BackwardShape>(m, "BackwardShape")
      .def(py::init<>())
      .def_readwrite("rows", &BackwardShape::rows)
      .def_readwrite("columns", &BackwardShape::columns)
      .def_readwrite("x_bytes", &BackwardShape::x_bytes)
      .def_readwrite("dz_bytes", &BackwardShape::dz_bytes)
      .def_readwrite("from_output", &BackwardShape::from_output)
      .def_readwrite("residual", &BackwardShape::residual)
      .def_readwrite("keep", &BackwardShape::keep)
      .def_readwrite("draws", &BackwardShape::draws)
      .def_readwrite("shifted", &BackwardShape::shifted)
      .def_readwrite("beside_columns", &BackwardShape::beside_columns)
      .def_readwrite("column_threads", &BackwardShape::column_threads)
      .def_readwrite("most_cluster", &BackwardShape::most_cluster);
  py::class_<BackwardTile>(m, "BackwardTile")
      .def_readonly("elements", &BackwardTile::elements)
      .def_readonly("lanes", &BackwardTile::lanes)
      .def_readonly("groups", &BackwardTile::groups)
      .def_readonly("vectors", &BackwardTile::vectors)
      .def_readonly("ctas_per_row", &BackwardTile::ctas_per_row)
      .def_readonly("cta_vectors", &BackwardTile::cta_vectors)
      .def_readonly("cluster", &BackwardTile::cluster)
      .def_readonly("smem_bytes", &BackwardTile::smem_bytes)
      .def_property_readonly("threads", &BackwardTile::threads);
  py::class_<RowSchedule>(m, "RowSchedule")
      .def_readonly("workers", &RowSchedule::workers)
      .def_readonly("period", &RowSchedule::period)
      .def_readonly("rounds", &RowSchedule::rounds)
      .def_readonly("ahead", &RowSchedule::ahead);

  m.def("choose_tile", &choose_tile);
  m.def("column_ctas", &column_ctas);
  m.def("tile_with_columns", &tile_with_columns);
  m.def("schedule_rows", &schedule_rows);
  m.def("keep_from", &keep_from);
}

void bind_decoding(py::module_& m) {
  py::class_<DecodingShape>(m, "DecodingShape")
      .def(py::init<>())
      .def_readwrite("batch", &DecodingShape::batch)
      .def_readwrite("heads_kv", &DecodingShape::heads_kv)
      .def_readwrite("rows", &DecodingShape::rows)
      .def_readwrite("seqlen_k", &DecodingShape::seqlen_k)
      .def_readwrite("head_dim", &DecodingShape::head_dim)
      .def_readwrite("head_dim_v", &DecodingShape::head_dim_v)
      .def_readwrite("element_bytes", &DecodingShape::element_bytes);
  py::class_<DecodingTile>(m, "DecodingTile")
      .def_readonly("head_dim", &DecodingTile::head_dim)
      .def_readonly("rows", &DecodingTile::rows)
      .def_readonly("warps", &DecodingTile::warps);
  py::class_<DecodingSplits>(m, "DecodingSplits")
      .def_readonly("splits", &DecodingSplits::splits)
      .def_readonly("cluster", &DecodingSplits::cluster);
  m.def("decoding_tile", &decoding_tile);
  m.def("decoding_splits", &decoding_splits);
  m.def("decoding_shared_bytes", &shared_bytes);
}

}  // namespace
}  // namespace flashbwd

PYBIND11_MODULE(flashbwd_host_tests, m) {
  m.doc() = "Host arithmetic of flashbwd: plans, workspace and schedule.";
  flashbwd::bind_problem(m);
  flashbwd::bind_arguments(m);
  flashbwd::bind_workspace(m);
  flashbwd::bind_sm90_schedule(m);
  flashbwd::bind_plan(m);
  flashbwd::bind_visibility(m);
  flashbwd::bind_order(m);
  flashbwd::bind_bias_blocks(m);
  flashbwd::bind_layer_norm(m);
  flashbwd::bind_decoding(m);
}
