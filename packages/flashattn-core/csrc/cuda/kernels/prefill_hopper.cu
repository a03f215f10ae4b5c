// The kernel cuda_prefill on compute capability 9.0. A producer warpgroup loads tiles, and each consumer warpgroup
// computes 64 rows. To overlap softmax and tensor cores, a consumer starts the next tile's scores before it adds this
// tile's values.
// A float32 or quantised array is split into 16-bit parts, see float_parts.h. Tensor cores truncate long sums. So for
// float32, tensor cores sum over one tile, and ordinary instructions add this sum to the output.
#include "kernel.h"
#include "mapped_tiles.h"
#include "split_keys.h"
#include "tile_ring.h"
#include "warp_rows.h"
#include "wgmma.h"

using namespace flashattn;

// Several blocks of a launch may compute the same rows and share their keys. Each of these blocks then computes some
// tiles of keys and writes a partial result. prefill_merge merges the partial results.
struct BlockShare {
  uint rows;  // index of the block's rows; blocks that share keys compute the same rows
  int chunk;  // which part of the tiles the block computes: number `chunk` of `chunks` parts
  int chunks;
};
FLASHATTN_FUNC BlockShare share_of_block(const SplitParams& split) {
  int later = int(blockIdx.x) - split.whole_blocks;
  if (split.num_chunks <= 1 || later < 0) return BlockShare{blockIdx.x, 0, 1};
  return BlockShare{uint(split.whole_blocks + later / split.num_chunks), later % split.num_chunks, split.num_chunks};
}

// The partial results of blocks that share keys. A result has ROWS rows. A row has DV columns of the output, then its
// maximum, then its sum. The output is not yet divided by the sum.
template <int ROWS, int DV>
struct BlockPartials {
  static constexpr int kPitch = DV + cuda::kPartialPadding;  // a multiple of four floats

  float* memory;

  // block: the block's number among the blocks that share keys.
  FLASHATTN_FUNC float* row(int block, int row) const { return memory + (int64_t(block) * ROWS + row) * kPitch; }
};

// D: head_dim, rounded up to a multiple of 64, which is a panel of SharedTile. DV: value_dim, rounded up to a multiple
// of 16. KEYS: keys per tile. PARTS: how many 16-bit floats represent a probability. K: the type of keys and values.
// Each head and batch element has one block per CONSUMERS * 64 queries. In the last wave, several blocks may share
// these queries and divide the keys, see BlockShare.
template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL prefill_hopper(const cuda::BoxArguments& arguments) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, CONSUMERS = Sizes::consumers, KEYS = Sizes::keys,
                STAGES = Sizes::stages, PARTS = Sizes::parts;
  FLASHATTN_INPUT_ARGUMENTS(T, K);
  FLASHATTN_VALUE(SplitParams, split);
  FLASHATTN_WRITTEN(float, partials);
  FLASHATTN_OUTPUT_ARGUMENTS(T);
  using Element = typename Operand<T>::Element;
  constexpr int kQueryParts = Operand<T>::kParts, kKeyParts = Sizes::key_parts, kValueParts = Sizes::value_parts;
  constexpr bool kFresh = kQueryParts > 1;
  constexpr int kRows = CONSUMERS * kWarpgroupRows, kReaders = CONSUMERS * 4;
  constexpr int kLaunched = 65536 / Sizes::blocks / ((CONSUMERS + 1) * kWarpgroup) / 8 * 8;
  static_assert(Sizes::consumer_registers * CONSUMERS + Sizes::producer_registers <= kLaunched * (CONSUMERS + 1),
                "more registers than the block has");
  static_assert(STAGES > kKeyParts, "the producer loads the next tile's keys while consumers read this tile's values");
  using Queries = SharedTile<Element, kRows, D>;
  using Keys = SharedTile<Element, KEYS, D>;
  using Values = SharedTile<Element, KEYS, DV>;
  using KeyRing = TileRing<Keys, STAGES, kKeyParts>;
  using ValueRing = TileRing<Values, STAGES, kValueParts>;
  extern __shared__ __align__(1024) uchar shared[];
  Queries queries = {shared_address(shared)};
  uint key_memory = queries.memory + kQueryParts * Queries::kBytes, value_memory = key_memory + KeyRing::kBytes;
  uint barriers = value_memory + ValueRing::kBytes;
  KeyRing keys = {key_memory, barriers};
  ValueRing values = {value_memory, barriers + KeyRing::kBarriers};
  Barrier queries_arrived = {values.barriers + ValueRing::kBarriers};
  uint* tile_list = static_cast<uint*>(shared_pointer(queries_arrived.address + kBarrierBytes));

  BlockShare share = share_of_block(split);
  BlockPosition block = block_position(params, params.num_heads, share.rows);
  int batch = block.batch, head = block.head, kv_head = head / (params.num_heads / params.num_kv_heads);
  int first_row = first_query(params, block.part, kRows), last_row = minimum(first_row + kRows, params.query_len) - 1;
  int lane = lane_index(), group = __shfl_sync(~0u, int(warp_index()) / 4, 0);

  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);
  Range queries_of_block = {first_row, last_row};
  KeyTiles<kRows, CONSUMERS, KEYS> next(visibility, queries_of_block, minimum(group, CONSUMERS - 1), {tile_list},
                                        share.chunk, share.chunks);

  if (threadIdx.x == 0) {
    keys.initialise(kReaders);
    values.initialise(kReaders);
    queries_arrived.initialise(1);
    publish_barriers();
  }
  if constexpr (kFresh) {
    auto from = rows_of(query, params, params.query, batch, head);
    for (int at = threadIdx.x; at < kRows * D / 8; at += (CONSUMERS + 1) * kWarpgroup) {
      int row = at / (D / 8), piece = at % (D / 8);
      EightInParts<Element, kQueryParts> eight;
      eight.load(from, first_row + row, piece * 8, head_dim, first_row + row <= last_row);
      FLASHATTN_UNROLL
      for (int part = 0; part < kQueryParts; ++part) {
        *static_cast<uint4*>(shared_pointer(queries.piece(row, piece) + part * Queries::kBytes)) = eight.parts[part];
      }
    }
    publish_operands();
  }
  next.template find<(CONSUMERS + 1) * kWarpgroup>(head, queries_of_block);
  __syncthreads();
  next.begin();

  if (group == CONSUMERS) {
    leave_registers<Sizes::producer_registers>();
    if (threadIdx.x % kWarpgroup == 0) {
      if (!kFresh) {
        queries_arrived.arrive_and_expect(Queries::kBytes);
        load_boxes(queries, arguments.query_map, first_row, head, batch, queries_arrived);
      }
      for (int n = 0, before = 0; n == 0 || before >= 0; ++n) {
        int first = next.is_there() ? next.first() : -1;
        if (first >= 0) keys.load(n, arguments.key_map, first, kv_head, batch);
        if (n > 0) values.load(n - 1, arguments.value_map, before, kv_head, batch);
        before = first;
        next.next();
      }
    }
    return;
  }
  take_registers<Sizes::consumer_registers>();

  WarpRows<T, DV, KEYS, Element> rows;
  int own_query = first_row + int(warp_index()) * kWarpRows;
  rows.begin(visibility, own_query, head, 1, lane);
  const auto multiply_keys = [&](Fragment(&scores)[KEYS / 8], int n) {
    FLASHATTN_UNROLL
    for (int part = 0; part < kKeyParts; ++part) {
      keys.wait_for_tile(n, part);
      if (part == 0) begin_products();
      begin_multiply_keys<head_dim, kQueryParts>(scores, queries, group * kWarpgroupRows, keys.tile(n, part), part);
    }
  };
  const auto pass_unneeded = [&] {  // skips tiles that the warpgroup's rows do not see
    for (; next.is_there() && !next.is_needed(); next.next()) {
      keys.pass(next.n);
      values.pass(next.n);
    }
  };
  if (!kFresh) queries_arrived.wait(0);
  pass_unneeded();
  while (next.sees()) {  // repeats only if the block map hides tiles between visible ones
    Fragment scores[KEYS / 8], of_tile[DV / 8];
    uint probabilities[KEYS / 16][PARTS][4];
    Fragment(&sums)[DV / 8] = kFresh ? of_tile : rows.output;
    const auto round_probabilities = [&] {
      FLASHATTN_UNROLL
      for (int i = 0; i < KEYS / 16; ++i) split_step<Element>(scores, i, probabilities[i]);
    };
    const auto add_values = [&](int n) {
      FLASHATTN_UNROLL
      for (int part = 0; part < kValueParts; ++part) {
        values.wait_for_tile(n, part);
        begin_add_values<kValueParts>(sums, probabilities, values.tile(n, part), part, kFresh);
      }
    };
    const auto values_added = [&](int n) {
      wait_for_products<0>(sums);
      if constexpr (kFresh) rows.add(sums);
      values.release(n);
    };
    bool is_unmasked = rows.look(visibility, next.first(), next.is_unmasked(), lane);
    multiply_keys(scores, next.n);
    wait_for_products<0>(scores);
    keys.release(next.n);
    auto first_rescaling = rows.to_probabilities(scores, visibility, next.first(), is_unmasked, lane);
    if (has_block_map) rows.rescale(first_rescaling);
    round_probabilities();
    for (next.next(); next.is_there() && next.is_needed(); next.next()) {
      is_unmasked = rows.look(visibility, next.first(), next.is_unmasked(), lane);
      multiply_keys(scores, next.n);
      add_values(next.n - 1);
      wait_for_products<kValueParts>(scores);
      keys.release(next.n);
      auto rescaling = rows.to_probabilities(scores, visibility, next.first(), is_unmasked, lane);
      values_added(next.n - 1);
      round_probabilities();
      rows.rescale(rescaling);
    }
    begin_products();
    add_values(next.n - 1);
    values_added(next.n - 1);
    pass_unneeded();
    if (!has_block_map) break;
  }
  rows.finish(visibility);
  if (share.chunks > 1) {
    BlockPartials<kRows, DV> results = {partials};
    FLASHATTN_UNROLL
    for (int h = 0; h < rows.kOwn; ++h) {
      float* row = results.row(blockIdx.x - split.whole_blocks, own_query - first_row + rows.own_row(h, lane));
      rows.leave_row(row, h, lane);
      if (rows.is_first(lane)) {
        *reinterpret_cast<float4*>(row + DV) = {rows.softmax[h].row_max, rows.softmax[h].row_sum, 0, 0};
      }
    }
    return;
  }
  uint not_finite = rows.store(FLASHATTN_ROW_OUTPUTS(T), params, sinks, batch, lane);
  attend_again(not_finite, FLASHATTN_ROW_OUTPUTS(T), query, FLASHATTN_STORED_INPUTS(K), visibility, sinks, batch, head,
               own_query, lane);
}

// Merges the partial results of blocks that share keys. Each warp merges one row. DV: as in prefill_hopper. ROWS: rows
// per block of prefill_hopper. The grid has one block for every WARPS rows.
template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL prefill_merge(const cuda::Arguments& arguments) {
  constexpr int DV = Sizes::value_dim, ROWS = Sizes::rows, WARPS = Sizes::warps;
  FLASHATTN_INPUT_ARGUMENTS(T, K);
  FLASHATTN_VALUE(SplitParams, split);
  FLASHATTN_WRITTEN(float, partials);
  FLASHATTN_OUTPUT_ARGUMENTS(T);
  constexpr int kOwn = (kSlices + FLASHATTN_LANES - 1) / FLASHATTN_LANES;
  BlockPartials<ROWS, DV> results = {partials};
  int lane = lane_index(), row = int(blockIdx.x) * WARPS + int(warp_index()), shared = row / ROWS;
  BlockPosition block = block_position(params, params.num_heads, uint(split.whole_blocks + shared));
  RowPosition position = row_position(first_query(params, block.part, ROWS) + row % ROWS, block.head, 1);
  if (position.query >= params.query_len) return;

  MergedSlice merged[kOwn];
  float probe = 0;  // NaN as soon as one of the numbers is not finite
  FLASHATTN_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    int slice = lane + i * FLASHATTN_LANES;
    merged[i].merge<4>(split.num_chunks, [&](int chunk, OnlineSoftmax& softmax, Slice& part) {
      const float* from = results.row(shared * split.num_chunks + chunk, row % ROWS);
      softmax = OnlineSoftmax{from[DV], from[DV + 1]};
      if (slice < kSlices) part = *reinterpret_cast<const Slice*>(from + slice * kSlice);
    });
    FLASHATTN_UNROLL
    for (int c = 0; c < kSlice; ++c) probe = multiply_add(merged[i].slice.columns[c], 0, probe);
    probe = multiply_add(merged[i].softmax.row_sum, 0, probe);
  }
  RowOutputs<T> outputs = FLASHATTN_ROW_OUTPUTS(T);
  if (__any_sync(~0u, probe != 0)) {
    attend_again(1u, outputs, query, FLASHATTN_STORED_INPUTS(K),
                 visibility_of(params, FLASHATTN_MASK_INPUTS, block.batch), sinks, block.batch, block.head,
                 position.query, lane);
    return;
  }
  FLASHATTN_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    int slice = lane + i * FLASHATTN_LANES;
    if (slice < kSlices) store_slice(merged[i], slice * kSlice, outputs, params, sinks, block.batch, position);
  }
}
