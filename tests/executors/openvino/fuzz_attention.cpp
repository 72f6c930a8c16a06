// Random steps, valid and invalid, against every kernel of the operator, for the address and undefined behaviour
// sanitizers. Every array is exactly as long as it says, so a read or write beside it ends the run.
//
//     fuzz_attention COUNT SEED
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention.hpp"

using namespace lockstep;

static std::mt19937_64 generator;

static int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }
static bool one_in(int n) { return pick(1, n) == 1; }

// An array on the heap of exactly this size, so that the sanitizer knows its ends.
template <class T>
struct Exact {
    std::size_t size;
    std::unique_ptr<T[]> data;
    explicit Exact(std::size_t n) : size(n), data(new T[n]()) {}
};

static float strange() {
    static const float values[] = {0.f, -0.f, INFINITY, -INFINITY, NAN, 1e38f, -1e38f, 1e-40f, 65504.f, 70000.f};
    return values[pick(0, 9)];
}

static Exact<float> numbers(std::size_t n, bool some_are_strange) {
    Exact<float> x(n);
    std::uint32_t state = pick(1, 1 << 30);
    for (std::size_t i = 0; i < n; i++) {
        state = state * 1664525 + 1013904223;  // Numerical Recipes' generator: cheap, and good enough for values
        x.data[i] = some_are_strange && state >> 27 == 0 ? strange() : float(state >> 24) / 32.f - 4.f;
    }
    return x;
}

static const int wrong_numbers[] = {-1, -2147483647 - 1, 2147483647, 1000, 33};

int main(int count_of_arguments, char** arguments) {
    if (count_of_arguments != 3) return 2;
    const long count = std::atol(arguments[1]);
    generator.seed(std::atol(arguments[2]));
    std::vector<const Kernel*> kernels;
    for (const char* name : {"avx512", "avx2", "portable"})
        if (const Kernel* kernel = find_kernel(name)) kernels.push_back(kernel);
    long refused = 0;
    for (long turn = 0; turn < count; turn++) {
        const Kernel& kernel = *kernels[pick(0, int(kernels.size()) - 1)];
        const int kv_heads = pick(1, 2), group = one_in(10) ? pick(5, 16) : pick(1, 3);
        Layout layout{kv_heads, LANES * (one_in(40) ? pick(3, 16) : pick(1, 2)), Storage(pick(0, 2))};
        const int num_sequences = pick(0, 4), num_blocks = pick(1, 12);
        std::vector<int> past, lengths, entries;
        int tokens = 0, total_entries = 0;
        for (int s = 0; s < num_sequences; s++) {
            lengths.push_back(one_in(20) ? pick(0, 70) : pick(1, 3));
            past.push_back(one_in(20) ? pick(0, 400) : pick(0, 40));
            entries.push_back((past[s] + lengths[s] + BLOCK_TOKENS - 1) / BLOCK_TOKENS + (one_in(6) ? pick(0, 2) : 0));
            tokens += lengths[s], total_entries += entries[s];
        }
        const int plan_size = 3 * (num_sequences + 1) + total_entries;
        Exact<std::int32_t> plan(plan_size);
        std::int32_t* begins = plan.data.get() + 1 + num_sequences;
        std::int32_t* table_begins = begins + num_sequences + 1;
        plan.data[0] = num_sequences;
        for (int s = 0; s < num_sequences; s++) {
            plan.data[1 + s] = past[s];
            begins[s + 1] = begins[s] + lengths[s];
            table_begins[s + 1] = table_begins[s] + entries[s];
        }
        for (int i = plan_size - total_entries; i < plan_size; i++) plan.data[i] = pick(0, num_blocks - 1);
        Step step;
        step.layout = layout;
        step.heads = kv_heads * group, step.window = one_in(3) ? pick(1, 200) : 0, step.scale = 0.125f;
        step.rotary_dim = 2 * pick(0, layout.head_dim / 2), step.epsilon = one_in(2) ? 1e-5f : 0.f;
        step.num_tokens = tokens, step.num_blocks = num_blocks, step.plan_size = plan_size;
        if (one_in(3)) {  // something is wrong, or happens to be right
            const int wrong = one_in(2) ? wrong_numbers[pick(0, 4)] : pick(-3, 60);
            plan.data[pick(0, plan_size - 1)] = wrong;
            if (one_in(6)) step.window = wrong;
            if (one_in(12)) step.plan_size = pick(0, plan_size);
        }
        const std::size_t dim = layout.head_dim;
        const bool some_are_strange = one_in(4);
        Exact<float> projected = numbers(std::size_t(tokens) * (step.heads + 2 * kv_heads) * dim, some_are_strange);
        Exact<float> rotary = numbers(std::size_t(tokens) * step.rotary_dim, some_are_strange);
        Exact<float> norms = numbers(2 * dim, some_are_strange);
        Exact<float> out(std::size_t(tokens) * step.heads * dim);
        Exact<std::uint8_t> cache(std::size_t(num_blocks) * layout.block_bytes());
        for (std::size_t i = 0; i < cache.size; i += 61) cache.data[i] = std::uint8_t(pick(0, 255));
        step.projected = projected.data.get(), step.rotary = rotary.data.get();
        step.norms = one_in(2) ? norms.data.get() : nullptr;
        step.plan = plan.data.get(), step.cache = cache.data.get(), step.out = out.data.get();
        refused += attention(step, kernel) != nullptr;
    }
    std::printf("%ld steps, %ld refused, %zu kernels\n", count, refused, kernels.size());
}
