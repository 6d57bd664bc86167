//! Checks the sliding windows of small models: those of masks in the form in which OpenVINO's GGUF front end creates
//! them, and the one in the metadata of a model.

use super::ir::Ir;
use super::length_conditions::{
    DIFFERENCE_MIN, Factors, LONG, TOLERANCE, difference, ir, load_ir, logits_alone,
};

/// Returns the logits of the last token of a sequence. With `past`, each position attends to itself and to at most this
/// number of earlier positions.
fn logits(past: Option<i64>) -> Vec<f32> {
    let mut runner = load_ir(&ir(Factors::Short, past), None).unwrap();
    logits_alone(&mut runner, 0, LONG)
}

#[test]
fn a_window_of_any_size_beyond_the_sequence_changes_no_logits() {
    let expected = logits(None);
    // The lower 32 bits of the third number are 3.
    for past in [LONG as i64, i64::from(i32::MAX), (1 << 32) + 3, i64::MAX] {
        let changed = difference(&logits(Some(past)), &expected);
        assert!(changed < TOLERANCE, "a window of {past} earlier positions changes logits by {changed}");
    }
    let changed = difference(&logits(Some(3)), &expected);
    assert!(changed > DIFFERENCE_MIN, "a window of 3 earlier positions changes logits by {changed}");
}

#[test]
fn an_invalid_window_is_rejected() {
    let check = |ir: &Ir, tokens: i64| {
        let error = load_ir(ir, None).err().unwrap().chain();
        let expected = format!("the sliding window has {tokens} tokens; it must have from 1 to {}", i32::MAX);
        assert!(error.contains(&expected), "{error}");
    };
    check(&ir(Factors::Short, Some(-5)), -4);
    for tokens in [-1, 0, 1 << 31] {
        let mut ir = ir(Factors::Short, None);
        ir.set_metadata("ovfleet", "sliding_window", tokens);
        check(&ir, tokens);
    }
}
