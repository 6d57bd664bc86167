//! Checks that any adapter directory is either read, with matrices of consistent sizes, or rejected with a reason.
//! `server/fuzz` runs this check for hours, and the test below runs it for a few seconds.

use std::cell::OnceCell;
use std::fs;

use tempfile::TempDir;

use super::file::{self, LoraMatrices};
use super::source::{ADAPTER_RANK_MAX, AdapterSource};

/// Separates the parts of an input: `adapter_config.json` and `adapter_model.safetensors`.
const SEPARATOR: u8 = 0x1e;

thread_local! {
    static DIRECTORY: OnceCell<TempDir> = const { OnceCell::new() };
}

/// Checks one input, and panics if a guarantee is violated.
pub(crate) fn check(input: &[u8]) {
    DIRECTORY.with(|directory| {
        let directory = directory.get_or_init(|| TempDir::new().expect("a temporary directory")).path();
        let mut parts = input.splitn(2, |byte| *byte == SEPARATOR);
        for name in ["adapter_config.json", "adapter_model.safetensors"] {
            fs::write(directory.join(name), parts.next().unwrap_or_default())
                .expect("the disk has room for a small file");
        }
        let source = AdapterSource { name: "a".to_owned(), path: directory.to_owned() };
        let adapter = match file::read(&source) {
            Ok(adapter) => adapter,
            Err(error) => return assert!(error.to_string().len() > "cannot use the adapter".len()),
        };
        assert!(!adapter.matrices.is_empty());
        for (module, matrices) in &adapter.matrices {
            let LoraMatrices { rank, rows, columns, down, up } = matrices;
            assert!((1..=ADAPTER_RANK_MAX).contains(rank), "{module}: rank {rank}");
            assert_eq!((down.len(), up.len()), (rank * columns, rows * rank), "{module}");
            assert!(down.iter().chain(up).all(|value| value.is_finite()), "{module}");
            assert_eq!(matrices.part(0..rows / 2).up.len(), rows / 2 * rank, "{module}");
        }
    });
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::mutations::{check_mutations, seeds};

    const CASES: u64 = 10_000;

    #[test]
    fn any_adapter_is_read_completely_or_rejected_with_a_reason() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/adapter");
        check_mutations(
            CASES,
            &seeds(directory),
            include_str!("../../../fuzz/dictionaries/adapter.dict"),
            check,
        );
    }
}
