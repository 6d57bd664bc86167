//! The input items of a response while it is generated, which are stored with it at the end.

use std::io::Write;
use std::sync::Arc;

use server_openai::responses::Item;

use crate::limits::{BudgetExhausted, ByteBudget, ByteClaim};

/// The items that a request adds to the conversation, in memory until the response is stored. Their bytes are claimed from
/// a budget, because the context length does not limit them: the prompt does not contain all parts of an item.
#[derive(Debug)]
pub(crate) struct RetainedInput {
    items: Vec<Arc<Item>>,
    _claim: ByteClaim,
}

impl RetainedInput {
    /// # Errors
    /// The budget is exhausted.
    pub(crate) fn new(budget: &Arc<ByteBudget>, items: Vec<Arc<Item>>) -> Result<Self, BudgetExhausted> {
        let mut claim = budget.claim();
        let bytes = items.iter().map(|item| json_bytes(item)).fold(0, u64::saturating_add);
        claim.grow_to(usize::try_from(bytes).unwrap_or(usize::MAX))?;
        Ok(Self { items, _claim: claim })
    }

    pub(crate) fn items(&self) -> &[Arc<Item>] {
        &self.items
    }
}

/// Returns the size of an item as JSON.
pub(crate) fn json_bytes(item: &Item) -> u64 {
    let mut count = Count(0);
    serde_json::to_writer(&mut count, item).expect("invariant: an item is JSON");
    count.0
}

/// Counts the bytes that are written.
struct Count(u64);

impl Write for Count {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_input_claims_its_bytes_as_long_as_it_exists() {
        let item =
            json!({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x".repeat(1000)});
        let bytes = serde_json::to_string(&item).unwrap().len();
        let item: Arc<Item> = Arc::new(serde_json::from_value(item).unwrap());
        assert_eq!(json_bytes(&item), bytes as u64);
        let budget = ByteBudget::new(2 * bytes, 2 * bytes);
        let retain = |count| RetainedInput::new(&budget, vec![Arc::clone(&item); count]);
        let one = retain(1).unwrap();
        assert!(retain(2).is_err());
        drop(one);
        assert_eq!(retain(2).unwrap().items().len(), 2);
    }
}
