// Adapters of a program: checks them, and groups the rows of a step by adapter.
#include "adapters.hpp"

#include <algorithm>

#include "elements.hpp"
#include "program.hpp"

namespace lockstep::native {
namespace {

constexpr std::uintptr_t LINE = 64;

// True if an operation of the body multiplies by a weight.
bool is_multiplied(const Program& p, std::int64_t weight) {
    for (std::int64_t i = 0; i < p.final_begin; i++) {
        const Op& op = p.ops[i];
        const bool multiplies = op.action == Action::product || op.action == Action::gate;
        if (multiplies && weight >= op.first_weight && weight < op.first_weight + op.num_weights) return true;
    }
    return false;
}

const char* weight_fault(const Program& p, const AdapterWeight& a) {
    if (a.weight < 0 || a.weight >= p.num_weights || !is_multiplied(p, a.weight)) return "an adapter changes no weight of a layer";
    if (a.rank < 1 || a.rank > MAX_ADAPTER_RANK) return "an adapter's rank is not 1 to 512";
    for (const std::int32_t type : {a.a_type, a.b_type})
        if (type != int(FloatType::f16) && type != int(FloatType::bf16)) return "an adapter has no numbers of 16 bits";
    const Weight& w = p.weights[a.weight];
    const std::int64_t columns = (w.columns + GROUP - 1) / GROUP * GROUP;
    if (!a.a || a.a_bytes < a.padded_rank() * columns * 2 || !a.b || a.b_bytes < w.panels() * a.rank * PANEL * 2)
        return "an adapter is cut";
    if (reinterpret_cast<std::uintptr_t>(a.a) % LINE || reinterpret_cast<std::uintptr_t>(a.b) % LINE)
        return "an adapter does not begin at a cache line";
    return nullptr;
}

}  // namespace

const AdapterKernel* find_adapter_kernel(const char* name) {
    const Elements* elements = find_elements(name);
#if defined(__x86_64__)
    if (elements == &elements_avx512) return &adapters_avx512;
    if (elements == &elements_avx2) return &adapters_avx2;
#endif
    return elements ? &adapters_portable : nullptr;
}

const char* Adapters::load(const Program& p, std::int64_t slot, const AdapterWeight* weights, std::int64_t count) {
    if (slot < 1 || slot > MAX_ADAPTERS || has(slot)) return "an adapter needs an empty slot from 1 to 4096";
    if (count < 1 || count > p.num_weights || !weights) return "an adapter changes no weights";
    std::vector<AdapterWeight> by_weight(std::size_t(p.num_weights), AdapterWeight{});
    std::int64_t rank = max_rank, parts = num_parts;
    for (std::int64_t i = 0; i < count; i++) {
        if (const char* wrong = weight_fault(p, weights[i])) return wrong;
        if (by_weight[weights[i].weight].rank) return "an adapter changes a weight twice";
        by_weight[weights[i].weight] = weights[i];
        rank = std::max(rank, weights[i].padded_rank());
    }
    for (std::int64_t i = 0; i < p.final_begin; i++) parts = std::max<std::int64_t>(parts, p.ops[i].num_weights);
    if (slot >= std::int64_t(slots.size())) slots.resize(std::size_t(slot + 1));
    slots[slot] = std::move(by_weight), max_rank = rank, num_parts = parts;
    return nullptr;
}

const char* Adapters::unload(std::int64_t slot) {
    if (!has(slot)) return "a slot has no adapter";
    slots[slot] = {};
    tiles.clear();
    return nullptr;
}

void Adapters::group(const std::int32_t* slots_of_rows, const std::vector<std::int64_t>& begins) {
    tiles.clear();
    tiles_at.assign(std::size_t(begins.back() + 1), 0);
    std::vector<std::int32_t> rows;
    for (std::size_t chunk = 0; chunk + 1 < begins.size(); chunk++) {
        tiles_at[begins[chunk]] = std::int64_t(tiles.size());
        rows.clear();
        for (std::int64_t row = begins[chunk]; row < begins[chunk + 1]; row++)
            if (slots_of_rows[row]) rows.push_back(std::int32_t(row));
        std::stable_sort(rows.begin(), rows.end(), [&](std::int32_t a, std::int32_t b) { return slots_of_rows[a] < slots_of_rows[b]; });
        for (const std::int32_t row : rows) {
            const bool is_new = std::int64_t(tiles.size()) == tiles_at[begins[chunk]] || tiles.back().slot != slots_of_rows[row];
            if (is_new || tiles.back().count == ADAPTER_ROWS) tiles.push_back({slots_of_rows[row], 0, {}});
            tiles.back().rows[tiles.back().count++] = row;
        }
    }
    tiles_at[begins.back()] = std::int64_t(tiles.size());
    const std::int64_t needed = begins.back() * num_parts * max_rank;
    if (!tiles.empty() && size < needed) h.reset(new float[std::size_t(needed)]), size = needed;
}

const AdapterTile* Adapters::tiles_of(std::int64_t first, std::int64_t count, std::int64_t& num_tiles) const {
    num_tiles = tiles.empty() ? 0 : tiles_at[first + count] - tiles_at[first];
    return num_tiles ? &tiles[tiles_at[first]] : nullptr;
}

}  // namespace lockstep::native
