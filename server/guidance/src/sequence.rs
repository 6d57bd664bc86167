//! The parser of a sequence, and the memory of the rows that it stores for the text.

use std::panic::AssertUnwindSafe;

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::panic_utils::catch_unwind;

use crate::memory::{OwnedMemory, captured_bytes, parser_bytes, step_bytes, table_bytes};
use crate::shared_lexer::SharedLexer;

#[derive(Clone)]
pub(crate) struct SequenceParser {
    pub(crate) parser: TokenParser,
    memory: OwnedMemory,
    /// The size in bytes of the parser, including the rows and the captured texts that it stores.
    stored_bytes: usize,
    /// The size in bytes of the row that the parser computed after its last token to check whether the text may end
    /// there. The parser does not store this row, and computes it again before it consumes the next token.
    discarded_bytes: usize,
}

impl SequenceParser {
    /// Creates a parser that uses `lexer`, in the start state of the form.
    pub(crate) fn new(lexer: &SharedLexer) -> Self {
        let parser = lexer.new_parser();
        let stored_bytes = parser_bytes(&parser);
        let memory = OwnedMemory::new(stored_bytes, lexer.memory().total());
        Self { parser, memory, stored_bytes, discarded_bytes: 0 }
    }

    /// The memory of the parser, without its lexer.
    pub(crate) fn memory(&self) -> &OwnedMemory {
        &self.memory
    }

    /// Measures the memory of the parser.
    pub(crate) fn measure(&self) {
        self.memory.set(self.stored_bytes + step_bytes(&self.parser));
    }

    /// The number of items that the parser has computed so far.
    pub(crate) fn items(&self) -> usize {
        self.parser.parser_stats().all_items
    }

    /// Makes the parser consume a token. The error is the parser's message, or says that the parser would have to
    /// backtrack.
    pub(crate) fn consume(&mut self, token: u32) -> Result<(), String> {
        let Self { parser, stored_bytes, discarded_bytes, .. } = self;
        let captures = parser.captures().len();
        let before = table_bytes(parser) + *discarded_bytes;
        let consumed = catch_unwind(AssertUnwindSafe(|| parser.consume_token(token)));
        let after = table_bytes(parser);
        *stored_bytes += after.saturating_sub(before) + captured_bytes(&parser.captures()[captures..]);
        let consumed = consumed.and_then(|backtracked| {
            catch_unwind(AssertUnwindSafe(|| parser.check_stop()))?;
            Ok(backtracked)
        });
        *discarded_bytes = table_bytes(parser) - after;
        self.measure();
        match consumed {
            Ok(0) => Ok(()),
            Ok(_) => Err("the parser would have to backtrack".to_owned()),
            Err(error) => Err(format!("{error:#}")),
        }
    }

    /// Whether no more text can follow.
    pub(crate) fn is_over(&self) -> bool {
        let reason = self.parser.stop_reason();
        reason != StopReason::NotStopped && reason.is_ok()
    }
}
