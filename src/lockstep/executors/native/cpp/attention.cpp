// Attention of a layer divided among threads: checks a step, stores keys and values, and cuts work into tiles and segments.
#include "attention.hpp"

#include <algorithm>
#include <climits>
#include <memory>
#include <new>
#include <vector>

#include "elements.hpp"

namespace lockstep::native {
namespace {

constexpr int ITEMS_PER_THREAD = 4;    // with fewer, rows are split so that threads end together
constexpr std::int64_t FEW_ITEMS = 8;  // up to this, one thread is faster than several
constexpr const char* TOO_SHORT = "the plan is too short for its sequences";
constexpr int MANY_TOKENS = 64;        // from this on, several threads store a sequence's keys and values

struct Plan {
    std::int64_t num_sequences, num_entries;
    const std::int32_t *past, *begins, *table_begins, *blocks, *totals, *first_columns;
    int num_parts, part;

    std::int64_t length(std::int64_t sequence) const {
        return std::int64_t(begins[sequence + 1]) - begins[sequence];
    }
    // Tokens that are in the sequence's blocks when it attends.
    std::int64_t total(std::int64_t sequence) const {
        return totals ? totals[sequence] : past[sequence] + length(sequence);
    }
    int first_column(std::int64_t sequence) const { return first_columns ? first_columns[sequence] : 0; }
    std::int64_t num_columns(std::int64_t sequence) const {
        return first_column(sequence) + (std::int64_t(table_begins[sequence + 1]) - table_begins[sequence]) / num_parts;
    }
    // The layer's block of a position.
    std::int32_t block_of(std::int64_t sequence, int position) const {
        const int column = position / BLOCK_TOKENS - first_column(sequence);
        return blocks[table_begins[sequence] + std::int64_t(column) * num_parts + part];
    }
};

// The first position that a row sees.
int first_seen(const Step& step, int position) {
    const int seen = step.totals ? step.window / 2 + 1 : step.window;
    return step.window && position >= seen ? position + 1 - seen : 0;
}

// Finds the parts of a step's plan; false: it is too short.
bool read_plan(const Step& step, Plan& plan) {
    plan.totals = step.totals, plan.first_columns = step.first_columns;
    plan.num_parts = step.num_parts, plan.part = step.part;
    plan.num_sequences = step.plan_size > 0 ? step.plan[0] : -1;
    plan.num_entries = step.plan_size - 3 * (plan.num_sequences + 1);
    if (plan.num_sequences < 0 || plan.num_entries < 0) return false;
    plan.past = step.plan + 1;
    plan.begins = plan.past + plan.num_sequences;
    plan.table_begins = plan.begins + plan.num_sequences + 1;
    plan.blocks = plan.table_begins + plan.num_sequences + 1;
    return true;
}

// True if `count` items of `size` fit into `room`, and none of the three is negative.
bool fits(std::int64_t count, std::int64_t size, std::int64_t room) {
    return room >= 0 && (count == 0 || size <= room / count);
}

const char* memory_fault(const Step& step, const Plan& plan) {
    const KVLayout& layout = step.layout;
    const std::int64_t dim = layout.head_dim;
    const std::int64_t heads = step.heads + (step.only_reads ? 0 : 2 * std::int64_t(layout.kv_heads));
    if (!step.queries && !fits(step.num_tokens, heads * dim, step.projected_size))
        return "queries, keys and values are too short";
    std::int64_t rotations = step.num_tokens;
    if (step.totals) {
        rotations = 0;
        for (std::int64_t s = 0; s < plan.num_sequences; s++) rotations = std::max(rotations, plan.total(s));
    }
    if (!fits(rotations, step.rotary_dim, step.rotary_size)) return "the rotations are too short";
    if (step.num_norms < 0 || step.num_norms > 3) return "more than queries, keys and values are normalised";
    if (step.num_norms && (!step.norms || step.norms_size < step.num_norms * dim)) return "the norms' weights are too short";
    const std::int64_t block = std::int64_t(layout.block_bytes());
    if (step.block_stride < block || !fits(step.num_blocks - 1, step.block_stride, step.cache_bytes - block))
        return "the cache is too short for its blocks";
    const std::int64_t query = step.heads * dim * std::int64_t(sizeof(float));
    if (step.queries) {
        if (!step.totals || step.query_stride < query || step.query_stride > step.block_stride)
            return "kept queries are for attention that looks both ways";
        const std::int64_t last = (BLOCK_TOKENS - 1) * step.query_stride + query;
        if (last > step.block_stride || !fits(step.num_blocks - 1, step.block_stride, step.queries_bytes - last))
            return "the kept queries are too short";
    }
    if (!fits(step.num_tokens, step.heads * dim, step.out_size)) return "the output is too short";
    return nullptr;
}

const char* plan_fault(const Step& step, const Plan& plan) {
    if (step.window < 0) return "the window is negative";
    if (step.num_parts < 1 || step.part < 0 || step.part >= step.num_parts) return "a column has no such block";
    if (step.totals && step.totals_size < plan.num_sequences) return "there are fewer total lengths than sequences";
    if (plan.begins[0] != 0 || plan.begins[plan.num_sequences] != step.num_tokens)
        return "the sequences' beginnings do not cover the tokens";
    if (plan.table_begins[0] != 0 || plan.table_begins[plan.num_sequences] > plan.num_entries)
        return "the tables' beginnings do not cover the tables";
    for (std::int64_t s = 0; s < plan.num_sequences; s++) {
        const std::int64_t length = plan.length(s);
        const std::int64_t entries = std::int64_t(plan.table_begins[s + 1]) - plan.table_begins[s];
        if (length < 0 || entries < 0) return "the beginnings of sequences or tables descend";
        if (plan.past[s] < 0) return "a past length is negative";
        if (plan.past[s] + length > INT_MAX) return "a sequence is longer than 2^31 - 1";
        if (plan.past[s] + length > plan.total(s)) return "a sequence's tokens are more than its total length";
        if (entries % step.num_parts) return "a block table has a column without some of its blocks";
        if (plan.first_column(s) < 0 || plan.first_column(s) > first_seen(step, plan.past[s]) / BLOCK_TOKENS)
            return "a block table begins behind a position that its sequence sees";
        if (plan.total(s) > plan.num_columns(s) * BLOCK_TOKENS) return "a block table is too short for its sequence";
    }
    for (std::int64_t i = 0; i < plan.table_begins[plan.num_sequences]; i++)
        if (plan.blocks[i] < 0 || plan.blocks[i] >= step.num_blocks) return "a block is not of this pool";
    return nullptr;
}

const char* fault(const Step& step, const Plan& plan) {
    const KVLayout& layout = step.layout;
    if (layout.kv_heads < 1 || step.heads < 1 || step.heads % layout.kv_heads)
        return "the query heads are no multiple of the KV heads";
    if (layout.head_dim < HEAD_DIM_UNIT || layout.head_dim % HEAD_DIM_UNIT || layout.head_dim > MAX_HEAD_DIM)
        return "a head's size is not a multiple of 8 up to 512";
    if (layout.storage < Storage::f32 || layout.storage > Storage::int8)
        return "keys and values have no such precision";
    if (step.rotary_dim < 0 || step.rotary_dim > layout.head_dim || step.rotary_dim % 2)
        return "the rotated dimensions are no even number up to a head's size";
    if (const char* wrong = plan_fault(step, plan)) return wrong;
    return memory_fault(step, plan);
}

// Calls todo(i) for each i below count, under the contract's modes on every thread.
template <class Do>
void for_each(const Workers& workers, std::int64_t count, Do todo) {
    if (count < FEW_ITEMS || workers.threads < 2) {
        for (std::int64_t i = 0; i < count; i++) todo(i);
        return;
    }
    const auto item = [](void* work, std::int64_t i) {
        const FloatMode mode;
        (*static_cast<Do*>(work))(i);
    };
    workers.run(workers.pool, count, item, &todo);
}

// Rows of one sequence and KV head against some segments. A row is a token's query head: row r is head r % group of the
// group, of the step's token r / group of the sequence.
struct Item {
    int sequence, head, first_row, num_rows, first_segment, last_segment;
};

struct Work {
    const Step& step;
    const Plan& plan;
    const AttentionKernel& kernel;
    const Workers& workers;
    int group = step.heads / step.layout.kv_heads;

    std::uint8_t* head_of(int sequence, int position, int head) const {
        return step.cache + plan.block_of(sequence, position) * step.block_stride + head * step.layout.head_bytes();
    }

    const float* projected(int token, int head) const {
        const int heads = step.heads + (step.only_reads ? 0 : 2 * step.layout.kv_heads);
        return step.projected + (std::size_t(token) * heads + head) * step.layout.head_dim;
    }

    // A query or key at a position, which is the step's `token`.
    Raw query(int sequence, int position, int token, int head) const {
        return raw(step.queries ? kept_query(sequence, position, head) : projected(token, head), position, token, norm(0));
    }
    Raw key(int position, int token, int head) const {
        return raw(projected(token, step.heads + head), position, token, norm(1));
    }
    Raw value(int token, int head) const {
        return {projected(token, step.heads + step.layout.kv_heads + head), norm(2), nullptr, 0, step.epsilon};
    }
    const float* norm(int number) const {
        return number < step.num_norms ? step.norms + number * step.layout.head_dim : nullptr;
    }
    Raw raw(const float* x, int position, int token, const float* norm) const {
        const float* rotary = step.rotary + std::size_t(step.totals ? position : token) * step.rotary_dim;
        return {x, norm, rotary, step.rotary_dim, step.epsilon};
    }
    const float* kept_query(int sequence, int position, int head) const {
        const std::int64_t block = plan.block_of(sequence, position);
        const std::uint8_t* row = step.queries + block * step.block_stride + position % BLOCK_TOKENS * step.query_stride;
        return reinterpret_cast<const float*>(row) + head * step.layout.head_dim;
    }

    void store(int sequence, int token) const {
        const KVLayout& layout = step.layout;
        const int position = plan.past[sequence] + token - plan.begins[sequence];
        for (int h = 0; h < layout.kv_heads; h++)
            kernel.store(layout, key(position, token, h), value(token, h), head_of(sequence, position, h),
                         position % BLOCK_TOKENS);
    }

    void store_all() const {
        for (int s = 0; s < plan.num_sequences; s++) {
            const int begin = plan.begins[s], end = plan.begins[s + 1];
            if (end - begin < MANY_TOKENS)
                for (int token = begin; token < end; token++) store(s, token);
            else
                for_each(workers, end - begin, [&](std::int64_t i) { store(s, begin + int(i)); });
        }
    }

    // Each row once, with the segments that its rows see.
    std::vector<Item> items() const {
        std::vector<Item> items;
        for (int s = 0; s < plan.num_sequences; s++) {
            const int num_rows = (plan.begins[s + 1] - plan.begins[s]) * group;
            for (int row = 0; row < num_rows; row += kernel.max_rows)
                for (int h = 0; h < step.layout.kv_heads; h++) {
                    Item item{s, h, row, std::min(kernel.max_rows, num_rows - row), 0, 0};
                    item.first_segment = first_key(position(s, row)) / SEGMENT_TOKENS;
                    item.last_segment = (last_key(s, position(s, row + item.num_rows - 1)) - 1) / SEGMENT_TOKENS + 1;
                    items.push_back(item);
                }
        }
        return items;
    }

    int position(int sequence, int row) const { return plan.past[sequence] + row / group; }
    // The keys that a row sees: from the first one up to, but without, the last one.
    int first_key(int position) const { return first_seen(step, position); }
    int last_key(int sequence, int position) const {
        if (!step.totals) return position + 1;
        const int total = plan.totals[sequence], half = step.window / 2;
        return step.window && half < total - position ? position + half + 1 : total;
    }
    int token_of(const Item& item, int row) const {
        return plan.begins[item.sequence] + (item.first_row + row) / group;
    }
    int head_of(const Item& item, int row) const { return item.head * group + (item.first_row + row) % group; }

    void attend(const Item& item, const Item& next, Share* rows) const {
        Tile tile;
        tile.layout = step.layout;
        tile.cache = step.cache + item.head * step.layout.head_bytes();
        tile.block_stride = step.block_stride;
        tile.blocks = plan.blocks + plan.table_begins[item.sequence] + plan.part;
        tile.num_parts = plan.num_parts;
        tile.first_column = plan.first_column(item.sequence);
        tile.num_columns = int(plan.num_columns(item.sequence));
        tile.scale = step.scale * 1.44269504f;  // log2(e): the softmax is one of powers of two
        tile.num_rows = item.num_rows;
        for (int r = 0; r < item.num_rows; r++) {
            const int at = position(item.sequence, item.first_row + r);
            tile.queries[r] = query(item.sequence, at, token_of(item, r), head_of(item, r));
            tile.begin[r] = first_key(at), tile.end[r] = last_key(item.sequence, at);
        }
        const int first = position(next.sequence, next.first_row), last = last_key(next.sequence, first) - 1;
        for (int b = 0; b < SEGMENT_BLOCKS; b++) {
            const int at = std::min(next.first_segment * SEGMENT_TOKENS + b * BLOCK_TOKENS, last);
            tile.next[b] = head_of(next.sequence, std::max(at, first_key(first)), next.head);
        }
        kernel.attend(tile, item.first_segment, item.last_segment, rows);
    }

    void finish(const Item& item, const Share* rows) const {
        for (int r = 0; r < item.num_rows; r++) {
            const std::size_t row = std::size_t(token_of(item, r)) * step.heads + head_of(item, r);
            float* out = step.out + row * step.layout.head_dim;
            const float inverse = 1.f / rows[r].weight;
            for (int d = 0; d < step.layout.head_dim; d++) out[d] = canonical(rows[r].values[d] * inverse);
        }
    }

    // Too few items for the threads: compute each segment separately, and fold the shares in order.
    void attend_split(const std::vector<Item>& items) const {
        const int dim = step.layout.head_dim, room = padded(dim);
        std::vector<Item> parts;
        std::vector<std::size_t> rows;  // start of each part's rows
        std::size_t num_rows = 0;
        for (const Item& item : items)
            for (int segment = item.first_segment; segment < item.last_segment; segment++) {
                parts.push_back(item);
                parts.back().first_segment = segment, parts.back().last_segment = segment + 1;
                rows.push_back(num_rows);
                num_rows += item.num_rows;
            }
        std::vector<Share> shares(num_rows);
        const std::unique_ptr<float[]> values(new float[num_rows * room]);  // not initialised
        for (std::size_t i = 0; i < num_rows; i++) shares[i].values = &values[i * room];
        for_each(workers, parts.size(),
                 [&](std::size_t i) { attend(parts[i], parts[std::min(i + 1, parts.size() - 1)], &shares[rows[i]]); });
        Share* total = shares.data();
        for (const Item& item : items) {
            const int num_parts = item.last_segment - item.first_segment;
            for (int i = 1; i < num_parts; i++)
                for (int r = 0; r < item.num_rows; r++) kernel.fold(total[r], total[i * item.num_rows + r], dim);
            finish(item, total);
            total += num_parts * item.num_rows;
        }
    }
};

}  // namespace

const char* plan_fault(const Step& step) {
    Plan plan;
    return read_plan(step, plan) ? plan_fault(step, plan) : TOO_SHORT;
}

const char* attention(const Step& step, const AttentionKernel& kernel, const Workers& workers) try {
    Plan plan;
    if (!read_plan(step, plan)) return TOO_SHORT;
    if (const char* wrong = fault(step, plan)) return wrong;
    const Work work{step, plan, kernel, workers};
    const std::vector<Item> items = work.items();
    if (!step.queries && !step.only_reads) work.store_all();
    if (items.size() < std::size_t(ITEMS_PER_THREAD) * std::max(1, workers.threads)) {
        work.attend_split(items);
    } else {
        for_each(workers, items.size(), [&](std::size_t i) {
            alignas(64) float values[MAX_ROWS * MAX_HEAD_DIM];
            Share rows[MAX_ROWS];
            for (int r = 0; r < MAX_ROWS; r++) rows[r].values = values + r * padded(step.layout.head_dim);
            work.attend(items[i], items[std::min(i + 1, items.size() - 1)], rows);
            work.finish(items[i], rows);
        });
    }
    return nullptr;
} catch (const std::bad_alloc&) {
    return "there is no memory for the step's plan";
}

const AttentionKernel* find_attention(const char* name) {
    const Elements* found = find_elements(name);
    if (!found) return nullptr;
#if defined(__x86_64__)
    if (found == &elements_avx512) return &attention_avx512;
    if (found == &elements_avx2) return &attention_avx2;
#endif
    return &attention_portable;
}

}  // namespace lockstep::native
