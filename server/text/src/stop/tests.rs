use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;

/// The expected result, found by searching every prefix of the whole text.
fn naive(text: &str, stops: &[&str], include_stop: bool) -> (String, Option<usize>) {
    for end in 0..=text.len() {
        let prefix = &text.as_bytes()[..end];
        let mut hits: Vec<_> =
            stops.iter().enumerate().filter(|(_, s)| prefix.ends_with(s.as_bytes())).collect();
        hits.retain(|(_, stop)| !stop.is_empty());
        hits.sort_by_key(|(index, stop)| (std::cmp::Reverse(stop.len()), *index));
        if let Some((index, stop)) = hits.first() {
            let end = if include_stop { end } else { end - stop.len() };
            return (text[..end].to_owned(), Some(*index));
        }
    }
    (text.to_owned(), None)
}

fn filtered(pieces: &[&str], stops: &[&str], include_stop: bool) -> (String, Option<usize>) {
    let mut filter = StopFilter::new(stops, include_stop);
    let mut text = String::new();
    let mut seen = String::new();
    for piece in pieces {
        seen.push_str(piece);
        match filter.push(piece) {
            StopFilterOutput::Text(piece) => {
                assert!(!piece.is_empty());
                text.push_str(&piece);
            }
            StopFilterOutput::Held => {}
            StopFilterOutput::Stopped { text: last, stop } => return (text + &last, Some(stop)),
        }
        // The filter must hold back exactly the longest suffix that may begin a stop string.
        let begins = |suffix: &str| stops.iter().any(|s| s.len() > suffix.len() && s.starts_with(suffix));
        let held = &seen[text.len()..];
        let longest = (0..=seen.len()).filter(|&at| seen.is_char_boundary(at)).map(|at| &seen[at..]);
        assert_eq!(held, longest.into_iter().find(|suffix| suffix.is_empty() || begins(suffix)).unwrap());
    }
    (text + &filter.finish(), None)
}

#[test]
fn any_splitting_gives_the_same_result_as_a_search_of_the_whole_text() {
    const ALPHABET: [&str; 5] = ["a", "b", "é", "\n", "😀"];
    let mut rng = StdRng::seed_from_u64(8);
    for _ in 0..20_000 {
        let word = |rng: &mut StdRng, length: usize| -> String {
            (0..length)
                .map(|_| ALPHABET[rng.random_range(0..(if length.is_multiple_of(2) { 2 } else { 5 }))])
                .collect()
        };
        let length = rng.random_range(1..5);
        let stops: Vec<String> = (0..length)
            .map(|_| {
                let n = rng.random_range(0..5);
                word(&mut rng, n)
            })
            .collect();
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let pieces: Vec<String> = (0..rng.random_range(0..8))
            .map(|_| {
                let n = rng.random_range(0..6);
                word(&mut rng, n)
            })
            .collect();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let include = rng.random_bool(0.5);
        let expected = naive(&pieces.concat(), &stops, include);
        assert_eq!(filtered(&pieces, &stops, include), expected, "{pieces:?} {stops:?}");
    }
}

#[test]
fn text_that_cannot_begin_a_stop_string_passes_immediately() {
    let mut filter = StopFilter::new(["\n\nUser:"], false);
    assert_eq!(filter.push("Hello"), StopFilterOutput::Text("Hello".into()));
    assert_eq!(filter.push("\n"), StopFilterOutput::Held);
    assert_eq!(filter.push("\n"), StopFilterOutput::Held);
    assert_eq!(filter.push("\nUs"), StopFilterOutput::Text("\n".into()));
    assert_eq!(filter.push("ual"), StopFilterOutput::Text("\n\nUsual".into()));
    assert_eq!(filter.push("\n\nUser: x"), StopFilterOutput::Stopped { text: String::new(), stop: 0 });
    assert_eq!(filter.push("more"), StopFilterOutput::Stopped { text: String::new(), stop: 0 });
    assert_eq!(filter.finish(), "");
}

#[test]
fn without_stop_strings_everything_passes() {
    let mut filter = StopFilter::new([""; 1], false);
    assert_eq!(filter.push("abc"), StopFilterOutput::Text("abc".into()));
    assert_eq!(filter.push(""), StopFilterOutput::Held);
    assert_eq!(filter.finish(), "");
}

#[test]
fn no_stop_string_spans_an_interruption() {
    let mut filter = StopFilter::new(["abc"], false);
    assert_eq!(filter.push("xab"), StopFilterOutput::Text("x".to_owned()));
    assert_eq!(filter.interrupt(), "ab");
    assert_eq!(filter.push("c"), StopFilterOutput::Text("c".to_owned()));
    assert_eq!(filter.push("abc"), StopFilterOutput::Stopped { text: String::new(), stop: 0 });
}

#[test]
fn a_stop_string_that_is_complete_before_activation_is_text() {
    let mut filter = StopFilter::new(["aba", "xy"], false).inactive();
    assert_eq!(filter.push("1xy2ab"), StopFilterOutput::Text("1xy2".into()));
    // The end of the ignored stop string is held back, because another stop string may begin there.
    assert_eq!(filter.push("a"), StopFilterOutput::Text("ab".into()));
    filter.activate();
    assert_eq!(filter.push("ba3"), StopFilterOutput::Stopped { text: String::new(), stop: 0 });
    let mut filter = StopFilter::new(["ab"], true).inactive();
    assert_eq!(filter.push("ab"), StopFilterOutput::Text("ab".into()));
    filter.activate();
    assert_eq!(filter.push("cab"), StopFilterOutput::Stopped { text: "cab".into(), stop: 0 });
}
