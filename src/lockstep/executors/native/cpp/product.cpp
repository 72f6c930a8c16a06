// Products of whole matrices: divides them into panels and tiles. Every instruction set uses the same division, though
// no bit depends on it.
#include "product.hpp"

#include <algorithm>
#include <cstring>

#include "bits.hpp"
#include "elements.hpp"
#include "threads.hpp"

namespace lockstep::native {
namespace {

constexpr std::int64_t BAND_BYTES = 256 << 10;  // quantised rows that stay in the L2 cache while panels pass

void store(const float* tile, int rows, std::int64_t count, float* out, std::int64_t stride) {
    for (int row = 0; row < rows; row++)
        for (std::int64_t i = 0; i < count; i++) out[row * stride + i] = canonical(tile[row * PANEL + i]);
}

}  // namespace

const Products* find_products(const Elements* elements) {
#if defined(__x86_64__)
    if (elements == &elements_avx512) return products_avx512();
    if (elements == &elements_avx2) return products_avx2();
#endif
    return elements ? products_portable() : nullptr;
}

void quantise(const Products& isa, Pool* pool, const float* x, std::int64_t stride, std::int64_t rows,
              std::int64_t columns, Numbers* out) {
    const std::int64_t groups = (columns + GROUP - 1) / GROUP;
    share(pool, rows, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; row++) isa.quantise(x + row * stride, columns, out + row * groups);
    });
}

void multiply(const Products& isa, Pool* pool, const Matrix& w, const Numbers* x, std::int64_t rows, float* out,
              std::int64_t stride) {
    const std::int64_t groups = w.groups();
    const std::int64_t band = std::max<std::int64_t>(MAX_TILE, BAND_BYTES / (groups * std::int64_t(sizeof(Numbers))));
    share(pool, w.count(), [&](std::int64_t begin, std::int64_t end) {
        alignas(64) float tile[MAX_TILE * PANEL];
        for (std::int64_t first = 0; first < rows; first += band)
            for (std::int64_t panel = begin; panel < end; panel++) {
                const std::int64_t features = std::min<std::int64_t>(PANEL, w.features - panel * PANEL);
                each_tile(isa, w, panel, x + first * groups, std::min(band, rows - first), tile,
                          [&](std::int64_t row, int count) {
                              store(tile, count, features, out + (first + row) * stride + panel * PANEL, stride);
                          });
            }
    });
}

void multiply_floats(const Products& isa, Pool* pool, int type, const void* weights, std::int64_t features,
                     std::int64_t columns, const float* x, std::int64_t x_stride, std::int64_t rows, float* out,
                     std::int64_t stride) {
    const std::int64_t size = type == 0 ? 4 : 2;
    share(pool, features, [&](std::int64_t begin, std::int64_t end) {
        if (begin < end)
            isa.floats(type, static_cast<const char*>(weights) + begin * columns * size, end - begin, columns, x, x_stride,
                       rows, out + begin, stride);
    });
}

}  // namespace lockstep::native
