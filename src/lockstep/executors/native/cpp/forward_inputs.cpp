// Inputs of a step: checks them before anything runs, and prepares what the operations read.
#include <algorithm>
#include <cstring>

#include "forward.hpp"

namespace lockstep::native {
namespace {

// Number of token types that every embedding has; 1 if there are none.
std::int64_t token_types(const std::vector<Op>& ops) {
    std::int64_t least = MAX_TOKEN_TYPES;
    for (const Op& op : ops)
        if (op.action == Action::embed) least = std::min<std::int64_t>(least, std::max(op.columns, 1));
    return least;
}

}  // namespace

// A step of attention with the block tables of a group.
Step Forward::step_of(std::int32_t group, const StepInput& input) const {
    Step step{};
    const WindowTables* tables = group ? input.windows + group - 1 : nullptr;
    step.plan = tables ? tables->plan : input.plan;
    step.plan_size = tables ? tables->plan_size : input.plan_size;
    step.first_columns = tables ? tables->first_columns : nullptr;
    step.num_parts = program.groups[group].num_parts, step.window = program.groups[group].window;
    step.num_tokens = input.num_tokens, step.num_blocks = input.num_blocks;
    step.totals = input.totals, step.totals_size = input.totals_size;
    return step;
}

const char* Forward::fault(const StepInput& step) const {
    if (step.num_tokens < 1 || step.num_tokens > MAX_TOKENS || !step.ids) return "a step has 1 to 2^20 tokens";
    if (!step.plan || step.plan_size < 1) return "the step has no plan";
    if (step.block_bytes != program.block_bytes || !step.cache || step.num_blocks < 1) return "the step has no KV blocks";
    if (step.stage < 0 || step.stage >= num_stages) return "the program has no such stage";
    if ((step.totals != nullptr) != (program.kept > 0)) return "total lengths are those of a program with stages";
    for (std::int64_t i = 0; i < step.num_tokens; i++)
        if (step.ids[i] < 0 || step.ids[i] >= program.vocab_size) return "a token is not of the vocabulary";
    const std::int64_t num_types = step.types ? token_types(ops) : 0;
    for (std::int64_t i = 0; step.types && i < step.num_tokens; i++)
        if (step.types[i] < 0 || step.types[i] >= num_types) return "a token has no such type";
    const std::int64_t columns = buffers[program.hidden].columns, rows = step.num_hidden_rows;
    if (rows && step.stage + 1 < num_stages) return "only the last stage has hidden states";
    if (rows < 0 || rows > step.num_tokens || (rows && (!step.hidden_rows || !step.hidden || step.hidden_size < rows * columns)))
        return "hidden states have no room";
    for (std::int64_t i = 0; i < rows; i++)
        if (step.hidden_rows[i] < 0 || step.hidden_rows[i] >= step.num_tokens) return "a row is not of the step";
    if (const char* wrong = plan_fault(step_of(0, step))) return wrong;
    if (const char* wrong = tables_fault(step)) return wrong;
    if (const char* wrong = adapters_fault(step)) return wrong;
    const std::int64_t num_sequences = step.plan[0];
    const std::int32_t *past = step.plan + 1, *begins = past + num_sequences;
    for (std::int64_t s = 0; s < num_sequences; s++) {
        const std::int64_t length = step.totals ? step.totals[s] : past[s] + std::int64_t(begins[s + 1]) - begins[s];
        if (length > positions) return "a sequence is longer than the table of positions";
        if (step.totals && length > MAX_TOKENS) return "a sequence has more than 2^20 tokens";
    }
    return nullptr;
}

// Checks the tables of the groups after the first one, of which the plan is valid.
const char* Forward::tables_fault(const StepInput& step) const {
    const std::int64_t num_sequences = step.plan[0], spans = 2 * (num_sequences + 1);  // S, lengths before, beginnings
    if (step.num_windows != program.num_windows() || (step.num_windows && !step.windows)) return "a group has no block tables";
    for (std::int64_t i = 0; i < step.num_windows; i++) {
        const WindowTables& tables = step.windows[i];
        if (!tables.plan || !tables.first_columns || tables.plan_size < spans) return "a group has no block tables";
        if (std::memcmp(tables.plan, step.plan, sizeof(std::int32_t) * std::size_t(spans)))
            return "the block tables of a group are those of other tokens";
        if (const char* wrong = plan_fault(step_of(std::int32_t(i + 1), step))) return wrong;
    }
    const std::int64_t parts = program.state_parts();
    if (!parts) return nullptr;
    if (!step.states || step.states_size != 2 * parts * num_sequences) return "a sequence has no state";
    return states_fault(states_of(step), step.num_tokens);
}

// Checks the slots of a step's tokens.
const char* Forward::adapters_fault(const StepInput& step) const {
    for (std::int64_t i = 0; step.adapters && i < step.num_tokens; i++)
        if (step.adapters[i] && !adapters.has(step.adapters[i])) return "a token has an adapter that is not loaded";
    return nullptr;
}

// The states of the sequences of a step whose plan is valid.
States Forward::states_of(const StepInput& step) const {
    const std::int32_t* begins = step.plan + 1 + step.plan[0];
    return {step.plan[0], program.state_parts(), step.num_blocks, program.block_bytes, begins, step.states, step.cache};
}

// Allocates room for the step's rows and their rotations. Positions follow from the plan.
void Forward::prepare(const StepInput& step) {
    input = step;
    group_by_adapter(step);
    for (std::size_t i = 0; i < buffers.size(); i++)
        if (buffers[i].life == Life::step) step_memory[i].reserve(step.num_tokens * buffers[i].row_bytes());
    const std::int64_t num_sequences = step.plan[0];
    const std::int32_t *past = step.plan + 1, *begins = past + num_sequences;
    row_places.resize(std::size_t(step.num_tokens));
    const std::int32_t *table_begins = begins + num_sequences + 1, *blocks = table_begins + num_sequences + 1;
    for (std::int64_t s = 0; s < num_sequences; s++)
        for (std::int32_t row = begins[s]; row < begins[s + 1]; row++) {
            const std::int32_t position = past[s] + row - begins[s];
            row_places[row] = {blocks[table_begins[s] + position / BLOCK_TOKENS], position};
        }
    if (program.kept) return turn_positions(step.totals, num_sequences);
    for (std::size_t i = 0; i < rotaries.size(); i++) {
        const Rotary& each = rotaries[i];
        turns[i].resize(std::size_t(step.num_tokens) * 2 * each.num_pairs);
        for (std::int64_t s = 0; s < num_sequences; s++)
            for (std::int64_t row = begins[s]; row < begins[s + 1]; row++)
                elements.rotation(vectors.data() + each.vector, past[s] + row - begins[s], each.factor, each.num_pairs,
                                  &turns[i][std::size_t(row) * 2 * each.num_pairs]);
    }
}

// The rotations of all positions up to the longest sequence. They are kept, for each stage of each text needs them.
void Forward::turn_positions(const std::int32_t* totals, std::int64_t num_sequences) {
    std::int64_t longest = 0;
    for (std::int64_t s = 0; s < num_sequences; s++) longest = std::max<std::int64_t>(longest, totals[s]);
    for (std::size_t i = 0; i < rotaries.size(); i++) {
        const Rotary& each = rotaries[i];
        const std::int64_t columns = 2 * each.num_pairs, known = std::int64_t(turns[i].size()) / columns;
        if (longest <= known) continue;
        turns[i].resize(std::size_t(longest * columns));
        for (std::int64_t position = known; position < longest; position++)
            elements.rotation(vectors.data() + each.vector, position, each.factor, each.num_pairs,
                              &turns[i][std::size_t(position * columns)]);
    }
}

}  // namespace lockstep::native
