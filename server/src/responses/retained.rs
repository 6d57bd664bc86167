//! The parts of a request that are retained while its response is generated.

use std::io::Write;
use std::sync::Arc;

use serde::Serialize;
use server_openai::responses::Item;

use crate::limits::{BudgetExhausted, ByteBudget, ByteReservation, ValuesMemory};

/// The items that a request adds to the conversation, which remain in memory until the response is stored. This value
/// also reserves the memory for them and for the parts of the request that the response repeats, such as the tools. The
/// context length does not limit this memory, because the prompt omits some parts of the items, as well as the tools
/// that the model must not call.
#[derive(Debug)]
pub(crate) struct RetainedRequest {
    items: Vec<Arc<Item>>,
    _reservation: ByteReservation,
}

impl RetainedRequest {
    /// Reserves the memory for `items` and for `response`, which has no output yet.
    ///
    /// # Errors
    /// The budget is exhausted.
    pub(crate) fn new(
        budget: &Arc<ByteBudget>,
        items: Vec<Arc<Item>>,
        response: &impl Serialize,
    ) -> Result<Self, BudgetExhausted> {
        let mut memory = ValuesMemory::default();
        let items_of_request: Vec<&Item> = items.iter().map(Arc::as_ref).collect();
        serde_json::to_writer(&mut memory, &(items_of_request, response))
            .expect("invariant: items and responses are JSON");
        let mut reservation = budget.empty_reservation();
        reservation.grow_to(memory.bytes())?;
        Ok(Self { items, _reservation: reservation })
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

/// A writer that only counts bytes.
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
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_items_and_the_response_reserve_their_memory_as_long_as_they_exist() {
        let item =
            json!({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x".repeat(1000)});
        let bytes = serde_json::to_string(&item).unwrap().len();
        let item: Arc<Item> = Arc::new(serde_json::from_value(item).unwrap());
        assert_eq!(json_bytes(&item), bytes as u64);
        let plain = json!({"tools": []});
        let with_tools = json!({"tools": vec![json!({"type": "function"}); 60]});
        let budget = ByteBudget::new(64 << 10, 64 << 10);
        let retain =
            |count, response: &Value| RetainedRequest::new(&budget, vec![Arc::clone(&item); count], response);
        assert!(retain(70, &plain).is_err(), "the items are too large");
        let one = retain(1, &with_tools).unwrap();
        assert!(retain(1, &with_tools).is_err(), "the first reserved most of the budget");
        drop(one);
        assert_eq!(retain(2, &plain).unwrap().items().len(), 2);
    }
}
