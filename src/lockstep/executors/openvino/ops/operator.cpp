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
        set_output_type(0, ov::element::f32, {get_input_partial_shape(PROJECTED)[0], 1, heads * head_dim});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto node = std::make_shared<LockstepAttention>(inputs);
        node->heads = heads, node->kv_heads = kv_heads, node->head_dim = head_dim, node->window = window;
        node->storage = storage, node->rotary_dim = rotary_dim, node->scale = scale, node->epsilon = epsilon;
        node->kernel = kernel;
        node->constructor_validate_and_infer_types();
        return node;
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("heads", heads);
        visitor.on_attribute("kv_heads", kv_heads);
        visitor.on_attribute("head_dim", head_dim);
        visitor.on_attribute("window", window);
        visitor.on_attribute("storage", storage);
        visitor.on_attribute("rotary_dim", rotary_dim);
        visitor.on_attribute("scale", scale);
        visitor.on_attribute("epsilon", epsilon);
        visitor.on_attribute("kernel", kernel);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        lockstep::Step step;
        step.layout = {int(kv_heads), int(head_dim), lockstep::Storage(storage)};
        step.heads = heads, step.window = window, step.rotary_dim = rotary_dim;
        step.scale = scale, step.epsilon = epsilon;
        step.num_tokens = inputs[PROJECTED].get_shape()[0];
        step.plan_size = inputs[PLAN].get_size();
        step.plan = inputs[PLAN].data<const std::int32_t>();
        step.projected = floats(inputs[PROJECTED], step.num_tokens * (heads + 2 * kv_heads) * head_dim);
        step.rotary = rotary_dim ? floats(inputs[ROTARY], step.num_tokens * rotary_dim) : nullptr;
        step.norms = inputs.size() > NORMS ? floats(inputs[NORMS], 2 * head_dim) : nullptr;
        const ov::Shape& cache = inputs[CACHE].get_shape();
        OPENVINO_ASSERT(cache[1] == step.layout.block_bytes(), "a block has ", cache[1], " bytes, not ",
                        step.layout.block_bytes());
        step.num_blocks = cache[0];
        step.cache = const_cast<std::uint8_t*>(inputs[CACHE].data<const std::uint8_t>());
        outputs[0].set_shape({std::size_t(step.num_tokens), 1, std::size_t(heads * head_dim)});
        step.out = outputs[0].data<float>();
        const lockstep::Kernel* found = lockstep::find_kernel(kernel.c_str());
        OPENVINO_ASSERT(found, "this processor has no kernel ", kernel);
        const char* wrong = lockstep::attention(step, *found);
        OPENVINO_ASSERT(!wrong, wrong);
        return true;
    }

private:
    static const float* floats(const ov::Tensor& tensor, std::size_t size) {
        OPENVINO_ASSERT(tensor.get_size() == size, "an input of ", tensor.get_size(), " numbers, not ", size);
        return tensor.data<const float>();
    }

    enum Input { PROJECTED, PLAN, CACHE, ROTARY, NORMS };
    std::int64_t heads = 0, kv_heads = 0, head_dim = 0, window = 0, storage = 0, rotary_dim = 0;
    double scale = 1, epsilon = 0;
    std::string kernel;
};

}  // namespace

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>({std::make_shared<ov::OpExtension<LockstepAttention>>()}));
