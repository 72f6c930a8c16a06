// Python interface of products, packing and threads. Functions return nullptr, or an error message; then nothing
// was read or written.
#include <new>
#include <system_error>

#include "bits.hpp"
#include "elements.hpp"
#include "pack.hpp"
#include "product.hpp"
#include "threads.hpp"

namespace lockstep::native {
namespace {

const Products* usable(const char* name) { return name ? find_products(find_elements(name)) : nullptr; }

constexpr const char* NO_ISA = "this processor or this library does not have that instruction set";
constexpr const char* NO_WEIGHTS = "weights must have 1 to 2^24 features and 1 to 2^20 columns, and be of a known type";

bool is_shape(std::int64_t features, std::int64_t columns) {
    return features >= 1 && features <= MAX_PRODUCT_FEATURES && columns >= 1 && columns <= MAX_PRODUCT_COLUMNS;
}

bool is_kind(int kind) { return kind >= 0 && kind < KINDS; }

// Columns rounded up to whole groups, or to whole blocks if a block has several groups.
bool is_packable(int kind, std::int64_t features, std::int64_t columns) {
    return is_kind(kind) && is_shape(features, columns) && columns % LAYOUTS[kind].block_columns == 0;
}

// True if all rows, which begin `stride` apart, fit. Rows are at most 2^40.
bool has_room(const void* data, std::int64_t capacity, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
    if (rows < 0 || rows > std::int64_t(1) << 40 || stride < columns || capacity < 0) return false;
    return rows == 0 || (data != nullptr && columns <= capacity && rows - 1 <= (capacity - columns) / stride);
}

std::int64_t packed_bytes(int kind, std::int64_t features, std::int64_t columns) {
    const Matrix matrix{Kind(kind), features, columns, nullptr};
    return matrix.count() * matrix.panel_bytes();
}

}  // namespace
}  // namespace lockstep::native

using namespace lockstep::native;
#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const char* native_pool_start(int threads, void** pool) {
    if (threads < 1 || threads > MAX_THREADS) return "a pool has 1 to 256 threads";
    if (pool == nullptr) return "there is no place for the pool";
    try {
        *pool = new Pool(threads);
    } catch (const std::system_error&) {
        return "the system does not start more threads";
    } catch (const std::bad_alloc&) {
        return "there is no memory for a pool of threads";
    }
    return nullptr;
}

EXPORTED void native_pool_stop(void* pool) { delete static_cast<Pool*>(pool); }

// Bytes of packed weights; -1 if such weights cannot be packed.
EXPORTED std::int64_t native_packed_bytes(int kind, std::int64_t features, std::int64_t columns) {
    return is_packable(kind, features, columns) ? packed_bytes(kind, features, columns) : -1;
}

EXPORTED const char* native_pack(int kind, const void* blocks, std::int64_t bytes, std::int64_t features,
                                 std::int64_t columns, void* panels, std::int64_t capacity) {
    if (!is_packable(kind, features, columns)) return NO_WEIGHTS;
    const Layout& layout = LAYOUTS[kind];
    if (blocks == nullptr || bytes != features * (columns / layout.block_columns) * layout.block_bytes)
        return "the blocks are not as many bytes as the shape has";
    if (panels == nullptr || capacity < packed_bytes(kind, features, columns)) return "the panels have no room there";
    pack(Kind(kind), static_cast<const std::uint8_t*>(blocks), features, columns, static_cast<std::uint8_t*>(panels));
    return nullptr;
}

// Converts rows of floats to groups of 40 bytes. Capacities count elements: floats, and groups.
EXPORTED const char* native_quantise(const char* isa, void* pool, const float* x, std::int64_t x_capacity,
                                     std::int64_t stride, std::int64_t rows, std::int64_t columns, void* out,
                                     std::int64_t out_capacity) {
    const Products* products = usable(isa);
    if (products == nullptr) return NO_ISA;
    if (!is_shape(1, columns)) return "rows must have 1 to 2^20 columns";
    const std::int64_t groups = (columns + GROUP - 1) / GROUP;
    if (!has_room(x, x_capacity, rows, columns, stride)) return "the rows do not fit their memory";
    if (!has_room(out, out_capacity, rows, groups, groups)) return "there is no room for the quantised rows";
    const FloatMode mode;
    quantise(*products, static_cast<Pool*>(pool), x, stride, rows, columns, static_cast<Numbers*>(out));
    return nullptr;
}

EXPORTED const char* native_multiply(const char* isa, void* pool, int kind, const void* panels, std::int64_t bytes,
                                     std::int64_t features, std::int64_t columns, const void* numbers,
                                     std::int64_t num_groups, std::int64_t rows, float* out, std::int64_t capacity,
                                     std::int64_t stride) {
    const Products* products = usable(isa);
    if (products == nullptr) return NO_ISA;
    if (!is_packable(kind, features, columns)) return NO_WEIGHTS;
    const Matrix matrix{Kind(kind), features, columns, static_cast<const std::uint8_t*>(panels)};
    if (panels == nullptr || bytes < packed_bytes(kind, features, columns)) return "the panels are fewer bytes than the shape has";
    if (!has_room(numbers, num_groups, rows, matrix.groups(), matrix.groups())) return "the quantised rows are fewer";
    if (!has_room(out, capacity, rows, features, stride)) return "there is no room for the outputs";
    const FloatMode mode;
    multiply(*products, static_cast<Pool*>(pool), matrix, static_cast<const Numbers*>(numbers), rows, out, stride);
    return nullptr;
}

// Float weights as they are stored: type 0 F32, 1 F16, 2 BF16.
EXPORTED const char* native_multiply_floats(const char* isa, void* pool, int type, const void* weights,
                                            std::int64_t bytes, std::int64_t features, std::int64_t columns,
                                            const float* x, std::int64_t x_capacity, std::int64_t x_stride,
                                            std::int64_t rows, float* out, std::int64_t capacity, std::int64_t stride) {
    const Products* products = usable(isa);
    if (products == nullptr) return NO_ISA;
    if (type < 0 || type > 2 || !is_shape(features, columns)) return NO_WEIGHTS;
    if (weights == nullptr || bytes < features * columns * (type == 0 ? 4 : 2)) return "the weights are fewer bytes than the shape has";
    if (!has_room(x, x_capacity, rows, columns, x_stride)) return "the rows do not fit their memory";
    if (!has_room(out, capacity, rows, features, stride)) return "there is no room for the outputs";
    const FloatMode mode;
    multiply_floats(*products, static_cast<Pool*>(pool), type, weights, features, columns, x, x_stride, rows, out, stride);
    return nullptr;
}
