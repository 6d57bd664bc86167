//! Formats errors with their causes.

/// Formats an error and its causes in one line. Omits a cause if the text before it already ends with that cause.
#[must_use]
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = String::new();
    for cause in anyhow::Chain::new(error).map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_has_all_causes_once() {
        let error = anyhow::anyhow!("the disk is full").context("failed to write").context("failed to store");
        assert_eq!(chain(error.as_ref()), "failed to store: failed to write: the disk is full");
        let error = anyhow::anyhow!("refused").context("connect").context("failed to watch: connect");
        assert_eq!(chain(error.as_ref()), "failed to watch: connect: refused");
    }
}
