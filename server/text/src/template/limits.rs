//! The limits on rendering chat templates.

/// Number of instructions that the template engine executes to render a conversation. Rendering a message takes a few
/// hundred instructions.
///
/// If exceeded: 400, `invalid_value`.
pub const STEPS_MAX: u64 = 20_000_000;
/// Number of instructions that the template engine executes to render a trial conversation, which shows what a template
/// supports. Trial conversations have at most four messages.
pub const TRIAL_STEPS_MAX: u64 = 1_000_000;
/// Depth of nested calls and blocks in a chat template.
///
/// If exceeded: 400, `invalid_value`.
pub const RECURSION_MAX: usize = 200;
/// Size of a rendered conversation.
///
/// If exceeded: 400, `invalid_value`.
pub const OUTPUT_BYTES_MAX: usize = 64 << 20;
/// Size of the source of a chat template.
///
/// If exceeded: the server does not start.
pub const SOURCE_BYTES_MAX: usize = 4 << 20;
