//! Mutates inputs: tests run the fuzz targets with them for seconds, while libFuzzer runs for hours. The same seed gives
//! the same inputs. It does not check results.

/// Maximum size of an input in bytes, as in `scripts/fuzz`.
const INPUT_BYTES_MAX: usize = 4096;

/// Numbers by SplitMix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    /// Returns a random number below `end`, or 0 if `end` is 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}

/// Returns one of the `seeds` with random mutations, some of which insert `words`.
pub(crate) fn mutated(random: &mut Random, seeds: &[Vec<u8>], words: &[Vec<u8>]) -> Vec<u8> {
    let mut input = random.pick(seeds).clone();
    for _ in 0..random.below(8) {
        let at = random.below(input.len() + 1);
        let until = (at + random.below(24)).min(input.len());
        match random.below(7) {
            0 => drop(input.drain(at..until)),
            1 => drop(input.splice(at..at, random.pick(words).iter().copied())),
            2 => drop(input.splice(at..until, random.pick(words).iter().copied())),
            3 => {
                let part = input[at..until].repeat(1 + random.below(20));
                input.splice(at..at, part);
            }
            4 => {
                let byte = random.next() as u8;
                input.splice(at..(at + 1).min(until), [byte]);
            }
            5 => {
                let other = random.pick(seeds);
                let from = random.below(other.len());
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            _ => {
                let other = random.pick(seeds);
                let from = random.below(other.len());
                let part = other[from..(from + random.below(64)).min(other.len())].to_vec();
                input.splice(at..at, part);
            }
        }
    }
    input.truncate(INPUT_BYTES_MAX);
    input
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
