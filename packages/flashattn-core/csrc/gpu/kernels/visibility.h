// Computes which keys a query sees, and turns the product of query and key into a score. The causal mask, the window
// and the key range leave each query one span of keys. Tree bits, a bool array and an additive array may hide more keys
// within that span.
//
// Scores are exponents of e, as masks and options expect. Before exp2, only the difference of two scores is multiplied
// by log2(e), because a large float32 score times log2(e) could overflow. CUDA's lane_rows.h is an exception: it
// multiplies row_max itself, and explains why.
#pragma once

#include "call/block_map.h"
#include "elements.h"
#include "offsets.h"

namespace flashattn {

struct KeySpan {
  int begin;
  int end;  // empty when begin >= end

  FLASHATTN_FUNC bool contains(int first, int count) const FLASHATTN_THREAD {
    return begin <= first && first + count <= end;
  }
  FLASHATTN_FUNC bool meets(int first, int count) const FLASHATTN_THREAD {
    return first < end && begin < first + count;
  }
};

FLASHATTN_FUNC KeySpan intersection(KeySpan a, KeySpan b) {
  return KeySpan{maximum(a.begin, b.begin), minimum(a.end, b.end)};
}

// A row of scores. It belongs to one query of one head.
struct Row {
  int query;
  int head;
  KeySpan seen;
  float slope;  // ALiBi's
};

// A kernel's mask arguments: the arrays that hide keys or change scores. A pointer is valid only if the call has the
// array.
struct MaskInputs {
  FLASHATTN_MASKS(FLASHATTN_FIELD)
};
#define FLASHATTN_MASK_INPUTS (MaskInputs{FLASHATTN_MASKS(FLASHATTN_FIELD_VALUE)})

struct Visibility {
  FLASHATTN_UNIFORM AttentionParams* params;
  MaskInputs inputs;  // these point to the batch element; only key_start and key_stop point to the whole array
  KeySpan keys;       // the key range, or all keys

  // The factor that turns the product of query and key into the score. With a soft-cap, it gives the argument of tanh
  // instead.
  float factor;

  // The span of keys that a query sees.
  FLASHATTN_FUNC KeySpan seen(int query) const FLASHATTN_THREAD {
    KeySpan span = keys;
    int diagonal = query + params->key_len - params->query_len;  // the key at the query's own position
    if (has_causal) {
      span.end = minimum(span.end, diagonal + 1);
    }
    if (has_window) {  // in 64 bits, because the window may be the largest int
      span.begin = int(maximum(int64_t(span.begin), int64_t(diagonal) - params->window + 1));
    }
    return span;
  }

  // The span of keys that some of the queries first..last see. Tree bits and mask arrays are ignored. seen(first) and
  // seen(last) are enough, because neither end of seen(query) decreases from one query to the next.
  FLASHATTN_FUNC KeySpan seen_by_any(int first, int last) const FLASHATTN_THREAD {
    return KeySpan{seen(first).begin, seen(last).end};
  }
  // The keys that all of the queries first..last see, and whose scores no mask array changes.
  FLASHATTN_FUNC KeySpan seen_by_all(int first, int last) const FLASHATTN_THREAD {
    if (has_visible || has_bias) {
      return KeySpan{0, 0};
    }
    return unmasked(first, last);
  }
  // Like seen_by_all(), but ignores arrays that have a block map. It is for kernels that also read the block map.
  FLASHATTN_FUNC KeySpan unmasked(int first, int last) const FLASHATTN_THREAD {
    if ((has_visible || has_bias) && !has_block_map) {
      return KeySpan{0, 0};
    }
    KeySpan span = KeySpan{seen(last).begin, seen(first).end};
    if (has_tree) {
      span.end = minimum(span.end, params->key_len - params->tree_size);
    }
    return span;
  }

  // The bitwise "or" of the block map's bytes, see call/block_map.h, for the given heads, queries and keys. Queries and
  // keys beyond the last one are ignored.
  FLASHATTN_FUNC int blocks(int first_head, int head_count, int first_query, int query_count, int first_key,
                            int key_count) const FLASHATTN_THREAD {
    if (!has_visible && !has_bias) {
      return kBlockShows;
    }
    if (!has_block_map) {
      return kBlockShows | kBlockChanges;
    }
    int last_query = minimum(first_query + query_count, params->query_len) - 1;
    int last_key = minimum(first_key + key_count, params->key_len) - 1;
    int last_head = params->block_map.head == 0 ? first_head : first_head + head_count - 1;
    int found = 0;
    for (int head = first_head; head <= last_head; ++head) {
      for (int row = first_query / kBlockSize; row <= last_query / kBlockSize; ++row) {
        const FLASHATTN_DEVICE uchar* map =
            inputs.block_map + head * params->block_map.head + row * params->block_map.row;
        for (int block = first_key / kBlockSize; block <= last_key / kBlockSize; ++block) {
          found |= map[block * params->block_map.column];
        }
      }
    }
    return found;
  }

  // The span of queries that see at least one of the keys first..last. Tree bits and mask arrays are ignored.
  FLASHATTN_FUNC KeySpan seen_from(int first, int last) const FLASHATTN_THREAD {
    KeySpan queries = KeySpan{0, params->query_len};
    int offset = params->key_len - params->query_len;
    first = maximum(first, keys.begin);
    last = minimum(last, keys.end - 1);
    if (first > last) {
      return KeySpan{0, 0};
    }
    if (has_causal) {
      queries.begin = maximum(0, first - offset);
    }
    if (has_window) {
      queries.end = int(minimum(int64_t(queries.end), int64_t(last) - offset + params->window));
    }
    return queries;
  }

  // Returns the row of a query. For a query beyond the last one, the row sees no key.
  FLASHATTN_FUNC Row row(int query, int head) const FLASHATTN_THREAD {
    bool exists = query < params->query_len;
    float slope = has_alibi_slopes && exists ? inputs.alibi_slopes[head * params->alibi_slopes.head] : 0.0f;
    return row_with_slope(query, head, slope);
  }
  FLASHATTN_FUNC Row row_with_slope(int query, int head, float slope) const FLASHATTN_THREAD {
    Row row = Row{query, head, KeySpan{0, 0}, slope};
    if (query < params->query_len) {
      row.seen = seen(query);
    }
    return row;
  }

  FLASHATTN_FUNC float score(float product, Row row, int key) const FLASHATTN_THREAD {
    return score_of_scaled(scaled(product), row, key);
  }

  // Whether each score is just the product times `factor`.
  FLASHATTN_FUNC bool has_plain_scores() const FLASHATTN_THREAD {
    return !has_softcap && !has_alibi_slopes && !has_bias;
  }

  // score() has two steps, scaled() and score_of_scaled(), because the gradient needs the result of tanh. With an
  // extreme soft-cap, the first step only multiplies by scale, because scale / softcap may underflow in float32.
  FLASHATTN_FUNC float scaled(float product) const FLASHATTN_THREAD {
    float scaled = rounded_product(product, factor);
    return has_softcap && !extreme_softcap ? precise_tanh(scaled) : scaled;
  }
  FLASHATTN_FUNC float score_of_scaled(float scaled, Row row, int key) const FLASHATTN_THREAD {
    float score = extreme_softcap ? extremely_capped(scaled)
                  : has_softcap   ? rounded_product(params->softcap, scaled)
                                  : scaled;
    if (has_alibi_slopes) {
      score -= row.slope * float(absolute(row.query + params->key_len - params->query_len - key));
    }
    return score;
  }
  // The derivative of the score with respect to scale * product. scaled: the result of scaled().
  FLASHATTN_FUNC float derivative(float scaled) const FLASHATTN_THREAD {
    if (!has_softcap) {
      return 1;
    }
    float tanh = extreme_softcap ? precise_tanh(scaled / params->softcap) : scaled;
    return (1 - tanh) * (1 + tanh);
  }

  // The score after masks. It is -inf for a hidden key, even if the score is NaN, because a hidden key may hold NaN.
  FLASHATTN_FUNC float masked(float score, Row row, int key) const FLASHATTN_THREAD {
    if (!row.seen.contains(key, 1)) {
      return -INFINITY;
    }
    bool visible = !has_visible || visible_row(row.head, row.query)[key * params->visible.column];
    return masked_by_arrays(score, row, key, visible);
  }
  // Like masked(), for a key within the row's span. visible: the bool array's entry, or true if there is no such array.
  FLASHATTN_FUNC float masked_by_arrays(float score, Row row, int key, bool visible) const FLASHATTN_THREAD {
    if (!visible || (has_tree && !tree_shows(row.query, key))) {
      return -INFINITY;
    }
    return has_bias ? biased(score, load_float(inputs.bias, bias_dtype, bias_offset(row.head, row.query, key))) : score;
  }
  // Adds an entry of the additive array to a score.
  FLASHATTN_FUNC float biased(float score, float bias) const FLASHATTN_THREAD {
    if (bias == -INFINITY) {
      return -INFINITY;
    }
    // Some models hide keys by adding the lowest float. The sum must stay finite, so that a row that has only such keys
    // becomes the mean of their values. The code does not use max(), which would turn NaN into a number.
    float sum = score + bias;
    return sum < -FLT_MAX ? -FLT_MAX : sum;
  }
  FLASHATTN_FUNC int64_t bias_offset(int head, int query, int key) const FLASHATTN_THREAD {
    return head * params->bias.head + query * params->bias.row + key * params->bias.column;
  }
  // A pointer to key 0 in a row of the bool array.
  FLASHATTN_FUNC const FLASHATTN_DEVICE bool* visible_row(int head, int query) const FLASHATTN_THREAD {
    return inputs.visible + head * params->visible.head + query * params->visible.row;
  }

 private:
  // The score after an extreme soft-cap. A small score stays as it is, because tanh(x) is x for a small x, and scaled /
  // softcap could be rounded to 0.
  FLASHATTN_FUNC float extremely_capped(float scaled) const FLASHATTN_THREAD {
    float small = params->softcap * 1e-4f;
    bool is_small = -small < scaled && scaled < small;
    return is_small ? scaled : rounded_product(params->softcap, precise_tanh(scaled / params->softcap));
  }

  FLASHATTN_FUNC bool tree_shows(int query, int key) const FLASHATTN_THREAD {
    int other = key - (params->key_len - params->tree_size);
    int node = query + params->tree_size - params->query_len;  // the last query is the last node
    if (other < 0) {
      return true;  // queries see all keys before the tree
    }
    if (node < 0) {
      return false;  // queries before the tree see none of its keys
    }
    return inputs.tree[node * params->tree.row + other / 32 * params->tree.column] >> (other % 32) & 1;
  }
};

FLASHATTN_FUNC Visibility visibility_of(FLASHATTN_UNIFORM AttentionParams& params, MaskInputs inputs, int batch) {
  KeySpan keys = {0, params.key_len};
  if (has_key_start) {
    keys.begin = clamped(inputs.key_start[batch_offset(params, params.key_start, batch)], 0, params.key_len);
  }
  if (has_key_stop) {
    keys.end = clamped(inputs.key_stop[batch_offset(params, params.key_stop, batch)], 0, params.key_len);
  }
  if (has_tree) {
    inputs.tree += batch_offset(params, params.tree, batch);
  }
  if (has_visible) {
    inputs.visible += batch_offset(params, params.visible, batch);
  }
  if (has_bias) {
    inputs.bias += batch_offset(params, params.bias, batch) * size_of_dtype(bias_dtype);
  }
  if (has_block_map) {
    inputs.block_map += batch_offset(params, params.block_map, batch);
  }
  if (has_alibi_slopes) {
    inputs.alibi_slopes += batch_offset(params, params.alibi_slopes, batch);
  }
  float factor = has_softcap && !extreme_softcap ? params.scale / params.softcap : params.scale;
  return Visibility{&params, inputs, keys, factor};
}

}  // namespace flashattn
