//! Mutates inputs for tests, which run the checks of the fuzz targets for a few seconds. (`make fuzz` runs libFuzzer
//! for a configurable time.) The number of a case determines its mutations. The callers provide the checks.

#[path = "../scheduler/tests/random/random.rs"]
#[expect(dead_code, reason = "mutations use only some of its functions")]
mod random;

pub(crate) use random::Random;

/// Maximum size of an input in bytes, the same as in `scripts/fuzz`.
const INPUT_BYTES_MAX: usize = 4096;

/// Reads the seeds in a directory, in the order of their names.
pub(crate) fn seeds(directory: &str) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(directory).expect("the directory of seeds can be read");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("the directory can be listed").path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{directory} contains seeds");
    paths.iter().map(|path| std::fs::read(path).expect("a seed can be read")).collect()
}

/// Calls `check` with each of the `seeds` and with `cases` mutations of them, some of which insert words of the
/// `dictionary`. If `check` panics, this function panics with the number of the seed or case and with the input, so
/// that the failure can be reproduced.
pub(crate) fn check_mutations(cases: u64, seeds: &[Vec<u8>], dictionary: &str, check: fn(&[u8])) {
    for (index, seed) in seeds.iter().enumerate() {
        check_input(check, seed, format_args!("seed {index}"));
    }
    let words = words(dictionary);
    for case in 0..cases {
        let input = mutated(&mut Random(case), seeds, &words);
        check_input(check, &input, format_args!("case {case}"));
    }
}

/// Calls `check` with an input, and panics with the `name` and the content of the input if `check` panics.
fn check_input(check: fn(&[u8]), input: &[u8], name: std::fmt::Arguments<'_>) {
    let outcome = std::panic::catch_unwind(|| check(input));
    assert!(outcome.is_ok(), "{name}: {}", input.escape_ascii());
}

/// Returns one of the `seeds` with up to seven random mutations, some of which insert `words`.
pub(crate) fn mutated(random: &mut Random, seeds: &[Vec<u8>], words: &[Vec<u8>]) -> Vec<u8> {
    let mut input = pick(random, seeds).clone();
    for _ in 0..below(random, 8) {
        let at = below(random, input.len() + 1);
        let until = (at + below(random, 24)).min(input.len());
        match below(random, 7) {
            0 => drop(input.drain(at..until)),
            1 => drop(input.splice(at..at, pick(random, words).iter().copied())),
            2 => drop(input.splice(at..until, pick(random, words).iter().copied())),
            3 => {
                let part = input[at..until].repeat(1 + below(random, 20));
                input.splice(at..at, part);
            }
            4 => {
                let byte = random.next() as u8;
                input.splice(at..(at + 1).min(until), [byte]);
            }
            5 => {
                let other = pick(random, seeds);
                let from = below(random, other.len());
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            _ => {
                let other = pick(random, seeds);
                let from = below(random, other.len());
                let part = other[from..(from + below(random, 64)).min(other.len())].to_vec();
                input.splice(at..at, part);
            }
        }
    }
    input.truncate(INPUT_BYTES_MAX);
    input
}

fn pick<'a, T>(random: &mut Random, all: &'a [T]) -> &'a T {
    &all[below(random, all.len())]
}

/// Returns a random number below `end`, or 0 if `end` is 0.
fn below(random: &mut Random, end: usize) -> usize {
    random.below(end.max(1) as u32) as usize
}

/// Returns the words of a dictionary in libFuzzer's format: one quoted word per line, with the escapes `\\`, `\"` and
/// `\x2a`.
pub(crate) fn words(dictionary: &str) -> Vec<Vec<u8>> {
    dictionary.lines().filter_map(|line| Some(word(line.strip_prefix('"')?.strip_suffix('"')?))).collect()
}

fn word(escaped: &str) -> Vec<u8> {
    let mut word = Vec::new();
    let mut rest = escaped.bytes();
    while let Some(byte) = rest.next() {
        word.push(match (byte, if byte == b'\\' { rest.next() } else { None }) {
            (_, Some(b'x')) => {
                let digits = [rest.next(), rest.next()].map(|digit| digit.unwrap_or(b'0'));
                let digit = |digit: u8| char::from(digit).to_digit(16).unwrap_or(0) as u8;
                digit(digits[0]) << 4 | digit(digits[1])
            }
            (_, Some(itself)) => itself,
            (byte, None) => byte,
        });
    }
    word
}
