//! Formats errors with their causes.

/// Formats an error and its causes in one line.
#[must_use]
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes: Vec<String> = anyhow::Chain::new(error).map(ToString::to_string).collect();
    causes.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_has_all_causes() {
        let error = anyhow::anyhow!("the disk is full").context("failed to write").context("failed to store");
        assert_eq!(chain(error.as_ref()), "failed to store: failed to write: the disk is full");
    }
}
