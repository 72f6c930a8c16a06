// Products of whole matrices: how they are cut into panels and tiles. The same cut on every instruction set, though no
// bit depends on it.
#include "product.hpp"

#include <algorithm>
#include <cstring>

#include "bits.hpp"
#include "threads.hpp"

namespace lockstep::native {
namespace {

constexpr std::int64_t BAND_BYTES = 256 << 10;  // quantised rows that stay in the second cache while panels pass
constexpr int FETCH_FROM_ROWS = 5;              // with fewer rows the processor's own fetching is as good

void store(const float* tile, int rows, std::int64_t count, float* out, std::int64_t stride) {
    for (int row = 0; row < rows; row++)
        for (std::int64_t i = 0; i < count; i++) out[row * stride + i] = canonical(tile[row * PANEL + i]);
}

// Rows of one panel, in tiles of equal size as nearly as can be.
void multiply_panel(const Products& isa, const Matrix& w, std::int64_t panel, const Numbers* x, std::int64_t rows,
                    float* out, std::int64_t stride) {
    alignas(64) float result[MAX_TILE * PANEL];
    const std::int64_t groups = w.groups(), bytes = w.panel_bytes(), most = tile_rows(w.kind);
    const std::int64_t tiles = (rows + most - 1) / most, features = std::min<std::int64_t>(PANEL, w.features - panel * PANEL);
    const std::uint8_t* codes = w.panels + panel * bytes;
    const bool fetches = rows >= FETCH_FROM_ROWS && panel + 1 < w.count();
    const int lines = fetches ? int((bytes + 64 * groups * tiles - 1) / (64 * groups * tiles)) : 0;
    for (std::int64_t tile = 0, row = 0; tile < tiles; tile++) {
        const int now = int(rows / tiles + (tile < rows % tiles));
        isa.tile(w.kind, codes, groups, x + row * groups, groups, now, result,
                 {codes + bytes + tile * lines * groups * 64, lines});
        store(result, now, features, out + row * stride + panel * PANEL, stride);
        row += now;
    }
}

}  // namespace

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
        for (std::int64_t row = 0; row < rows; row += band)
            for (std::int64_t panel = begin; panel < end; panel++)
                multiply_panel(isa, w, panel, x + row * groups, std::min(band, rows - row), out + row * stride, stride);
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
