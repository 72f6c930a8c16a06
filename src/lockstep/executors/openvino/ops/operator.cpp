// The operator as OpenVINO sees it: a node of the graph with attention.hpp's step as its inputs.
#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>

#include "attention.hpp"

namespace {

class LockstepAttention : public ov::op::Op {
public:
    OPENVINO_OP("LockstepAttention", "lockstep");
    LockstepAttention() = default;
    explicit LockstepAttention(const ov::OutputVector& inputs) : Op(inputs) {}

    void validate_and_infer_types() override {
        set_output_type(0, ov::element::f32, {get_input_partial_shape(QUERIES)[0], heads * head_dim});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto node = std::make_shared<LockstepAttention>(inputs);
        node->heads = heads, node->kv_heads = kv_heads, node->head_dim = head_dim, node->window = window;
        node->storage = storage, node->scale = scale, node->kernel = kernel;
        node->constructor_validate_and_infer_types();
        return node;
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("heads", heads);
        visitor.on_attribute("kv_heads", kv_heads);
        visitor.on_attribute("head_dim", head_dim);
        visitor.on_attribute("window", window);
        visitor.on_attribute("storage", storage);
        visitor.on_attribute("scale", scale);
        visitor.on_attribute("kernel", kernel);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        lockstep::Step step;
        step.layout = {int(kv_heads), int(head_dim), lockstep::Storage(storage)};
        step.heads = heads, step.window = window, step.scale = scale;
        step.num_tokens = inputs[QUERIES].get_shape()[0];
        step.num_sequences = inputs[PAST].get_size();
        step.num_table_entries = inputs[BLOCKS].get_size();
        step.queries = inputs[QUERIES].data<const float>();
        step.keys = inputs[KEYS].data<const float>();
        step.values = inputs[VALUES].data<const float>();
        step.past = inputs[PAST].data<const std::int32_t>();
        step.begins = inputs[BEGINS].data<const std::int32_t>();
        step.blocks = inputs[BLOCKS].data<const std::int32_t>();
        step.table_begins = inputs[TABLE_BEGINS].data<const std::int32_t>();
        const ov::Shape& cache = inputs[CACHE].get_shape();
        OPENVINO_ASSERT(cache[1] == step.layout.block_bytes(), "a block has ", cache[1], " bytes, not ",
                        step.layout.block_bytes());
        step.num_blocks = cache[0];
        step.cache = const_cast<std::uint8_t*>(inputs[CACHE].data<const std::uint8_t>());
        outputs[0].set_shape({std::size_t(step.num_tokens), std::size_t(heads * head_dim)});
        step.out = outputs[0].data<float>();
        const lockstep::Kernel* found = lockstep::find_kernel(kernel.c_str());
        OPENVINO_ASSERT(found, "this processor has no kernel ", kernel);
        const char* wrong = lockstep::attention(step, *found);
        OPENVINO_ASSERT(!wrong, wrong);
        return true;
    }

private:
    enum Input { QUERIES, KEYS, VALUES, PAST, BEGINS, BLOCKS, TABLE_BEGINS, CACHE };
    std::int64_t heads = 0, kv_heads = 0, head_dim = 0, window = 0, storage = 0;
    double scale = 1;
    std::string kernel;
};

}  // namespace

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>({std::make_shared<ov::OpExtension<LockstepAttention>>()}));
