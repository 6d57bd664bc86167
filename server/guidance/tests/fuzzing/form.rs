//! Checks that an arbitrary form either compiles or is rejected with the path of the invalid part. If it compiles, a
//! token must be allowed at each position of a random output until the output may end. `server/fuzz` runs this check
//! for hours, `main.rs` for seconds.

use std::sync::LazyLock;

use serde_json::Value;
use server_engine::{Guide as _, Progress, TokenSet};
use server_guidance::{Compiler, Dialect, Form, Guide, Trial, TrialError, Vocabulary, structural_tag};

/// Largest number of tokens sampled from a form.
const TOKENS_MAX: usize = 48;

/// Tokens of several bytes; the flag marks special tokens.
const LONGER: [(&str, bool); 14] = [
    ("{\"", false),
    ("\":", false),
    ("\", \"", false),
    ("true", false),
    ("null", false),
    ("  ", false),
    ("the", false),
    ("日本", false),
    ("\\n", false),
    ("12", false),
    ("<end>", true),
    ("<tool_call>", true),
    ("</tool_call>", true),
    ("<|\"|>", true),
];

static COMPILER: LazyLock<Compiler> = LazyLock::new(|| {
    let bytes = (0..=255u8).map(|byte| (vec![byte], false));
    let longer = LONGER.iter().map(|(text, special)| (text.as_bytes().to_vec(), *special));
    let vocabulary = Vocabulary::new(bytes.chain(longer)).expect("a vocabulary");
    Compiler::new(vocabulary, 1).expect("a trie").with_trial(Box::new(NoTrials))
});

/// Rejects all forms that need a trial, because only forms that need none are known to be harmless in this process. The
/// fuzzer detects forms that take too much time or memory.
struct NoTrials;

impl Trial for NoTrials {
    fn run(&self, _request: &[u8]) -> Result<(), TrialError> {
        Err(TrialError::TooExpensive("is not tried".to_owned()))
    }
}

/// Compiles and follows the form in `input`, and panics if the guarantees do not hold. The first byte selects the kind
/// of the form.
pub(crate) fn check(input: &[u8]) {
    let Some((kind, text)) = input.split_first() else { return };
    let text = String::from_utf8_lossy(text);
    let Some(form) = form(*kind, &text) else { return };
    match COMPILER.compile(&form) {
        Ok(guide) => follow(&guide, input),
        Err(error) => {
            assert!(error.at.starts_with("it"), "{error:?} in {form:?}");
            assert!(!error.problem.is_empty(), "{form:?}");
        }
    }
}

/// Returns the form in an input, or `None` if the input does not contain one.
fn form(kind: u8, text: &str) -> Option<Form> {
    let at = || "it".to_owned();
    let json = || serde_json::from_str::<Value>(text).ok();
    let dialects = [Dialect::Python, Dialect::Gemma, Dialect::Qwen, Dialect::MiniCpm];
    match kind {
        b'j' => Some(Form::Json { schema: json()?, at: at() }),
        b'r' => Some(Form::Regex { pattern: text.to_owned(), at: at() }),
        b'g' => Some(Form::Grammar { text: text.to_owned(), at: at() }),
        b't' => match structural_tag(json()?.as_object()?, "it") {
            Ok(form) => Some(form),
            Err(error) => {
                assert!(error.at.starts_with("it") && !error.problem.is_empty(), "{error:?}");
                None
            }
        },
        b'0'..=b'3' => {
            let dialect = dialects[usize::from(kind - b'0')];
            Some(Form::Value { dialect, schema: json()?, at: at() })
        }
        _ => None,
    }
}

/// Samples an output, choosing tokens by `input`, until it ends, an operation fails, or it has `TOKENS_MAX` tokens.
/// Panics if no token is allowed where the output may not end.
fn follow(guide: &Guide, input: &[u8]) {
    let vocabulary = COMPILER.vocabulary().len() as u32;
    let mut allowed = TokenSet::new(vocabulary);
    // An error is not a defect: if a form exceeds the work limit of a step, only its request fails.
    let Ok(mut state) = guide.start() else { return };
    let mut hash =
        input.iter().fold(7_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(u32::from(*byte)));
    for _ in 0..TOKENS_MAX {
        allowed.clear();
        let Ok(progress) = state.allow(&mut allowed) else { return };
        if progress == Progress::Ended {
            return;
        }
        hash = hash.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let from = hash % vocabulary;
        let chosen = (from..vocabulary).chain(0..from).find(|token| allowed.contains(*token));
        let Some(token) = chosen else {
            assert_eq!(progress, Progress::MayEnd, "no token is allowed, but the form is not complete");
            return;
        };
        match state.commit(token) {
            Ok(Progress::Ended) | Err(_) => return,
            Ok(_) => {}
        }
    }
}
