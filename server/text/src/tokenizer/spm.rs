//! Implements the BPE of SentencePiece, whose pieces have scores, for GGUF files. As long as two neighbors can be
//! merged into a piece, the pair whose piece has the highest score is merged; of several pairs with the same score, the
//! leftmost is merged first.

use std::{
    cmp::Ordering,
    collections::{BinaryHeap, HashMap},
    fmt,
};

use aho_corasick::{AhoCorasick, MatchKind};

use crate::error::EncodeError;
use crate::vocabulary::fallback_byte;

/// The character that SentencePiece writes in place of a space.
pub(super) const SPACE: &str = "\u{2581}";

/// The kind of a token; the numbers are those of `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl Kind {
    pub(super) fn from_number(number: i64) -> Self {
        match number {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }

    /// Whether text becomes a token of this kind only if special tokens are parsed.
    pub(super) fn is_special(self) -> bool {
        matches!(self, Self::Control | Self::Unknown)
    }
}

/// The parts from which a model is built.
pub(super) struct Pieces<'a> {
    pub(super) tokens: &'a [String],
    pub(super) scores: &'a [f32],
    pub(super) kinds: &'a [Kind],
    /// The token for characters that have no token of their own, in models without byte tokens.
    pub(super) unknown: Option<u32>,
    pub(super) options: Options,
}

/// Options for preparing text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    /// Whether to insert a space before the text, and before text that follows a special or user-defined token.
    pub(super) add_space_prefix: bool,
    /// Whether to replace runs of spaces with one space, and to remove spaces at both ends of the text.
    pub(super) remove_extra_whitespaces: bool,
    /// Whether to drop whitespace after most special and user-defined tokens, as Phi-3 does.
    pub(super) strip_after_special: bool,
}

/// A SentencePiece BPE model.
pub(super) struct Spm {
    ids: HashMap<String, u32>,
    /// The tokens that merging can produce, by piece: the ID, the score, and whether the token is unused.
    joinable: HashMap<String, (u32, f32, bool)>,
    bytes: Box<[Option<u32>; 256]>,
    unknown: Option<u32>,
    options: Options,
    /// The tokens that are recognized verbatim even if special tokens are not parsed: the user-defined tokens.
    user_defined: Verbatim,
    all: Verbatim,
}

impl Spm {
    pub(super) fn new(pieces: &Pieces<'_>) -> Result<Self, String> {
        let mut ids = HashMap::with_capacity(pieces.tokens.len());
        let mut joinable = HashMap::with_capacity(pieces.tokens.len());
        let mut bytes = Box::new([None; 256]);
        let (mut user_defined, mut all) = (Vec::new(), Vec::new());
        for (id, (token, &kind)) in (0u32..).zip(pieces.tokens.iter().zip(pieces.kinds)) {
            if ids.insert(token.clone(), id).is_some() {
                return Err(format!("has {token:?} twice"));
            }
            match kind {
                Kind::Normal | Kind::Unused => {
                    joinable.insert(token.clone(), (id, pieces.scores[id as usize], kind == Kind::Unused));
                }
                Kind::Byte => {
                    let byte = fallback_byte(token)
                        .ok_or(format!("has the byte token {token:?}; expected <0x00> to <0xFF>"))?;
                    bytes[usize::from(byte)] = Some(id);
                }
                Kind::UserDefined => user_defined.push((token.as_str(), id)),
                Kind::Control | Kind::Unknown => all.push((token.as_str(), id)),
            }
        }
        all.extend_from_slice(&user_defined);
        Ok(Self {
            ids,
            joinable,
            bytes,
            unknown: pieces.unknown,
            options: pieces.options,
            user_defined: Verbatim::new(&user_defined)?,
            all: Verbatim::new(&all)?,
        })
    }

    pub(super) fn token_id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    pub(super) fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>, EncodeError> {
        let mut tokens = Vec::new();
        let verbatim = if parse_special { &self.all } else { &self.user_defined };
        let mut done = 0;
        for (start, end, id) in verbatim.find(text) {
            if start > done {
                self.encode_fragment(&text[done..start], &mut tokens)?;
            }
            tokens.push(id);
            done = end;
            if self.options.strip_after_special && verbatim.strips_after(id) {
                let rest = &text[end..];
                done += rest.len() - rest.trim_ascii_start().len();
            }
        }
        if done < text.len() {
            self.encode_fragment(&text[done..], &mut tokens)?;
        }
        Ok(tokens)
    }

    /// Encodes a part of the text between tokens that are recognized verbatim.
    fn encode_fragment(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), EncodeError> {
        let mut prepared = String::with_capacity(text.len() + text.len() / 2 + SPACE.len());
        // Every part gets the prefix, because it is at the start of the text or follows a special or user-defined
        // token.
        if self.options.add_space_prefix {
            prepared.push_str(SPACE);
        }
        if self.options.remove_extra_whitespaces {
            let words: Vec<&str> = text.split(' ').filter(|word| !word.is_empty()).collect();
            prepared.push_str(&words.join(SPACE));
        } else {
            prepared.push_str(&text.replace(' ', SPACE));
        }
        Merge::new(self, &prepared).run(tokens)
    }
}

impl fmt::Debug for Spm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spm").field("options", &self.options).finish_non_exhaustive()
    }
}

/// The tokens that are matched verbatim. Only the text between them is split into symbols, which are merged. The
/// leftmost match comes first; if several tokens match at a position, the longest is used.
struct Verbatim {
    /// `None` if there are no such tokens.
    automaton: Option<AhoCorasick>,
    ids: Vec<u32>,
    /// The IDs of tokens after which whitespace is not dropped.
    keep_space_after: Vec<u32>,
}

impl Verbatim {
    fn new(tokens: &[(&str, u32)]) -> Result<Self, String> {
        let tokens: Vec<_> = tokens.iter().filter(|(text, _)| !text.is_empty()).collect();
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(text, _)| text))
            .map_err(|error| format!("cannot be searched for: {error}"))?;
        let keeps = |text: &str| matches!(text, "<unk>" | "<s>" | "<|endoftext|>");
        Ok(Self {
            automaton: (!tokens.is_empty()).then_some(automaton),
            ids: tokens.iter().map(|(_, id)| *id).collect(),
            keep_space_after: tokens.iter().filter(|(text, _)| keeps(text)).map(|(_, id)| *id).collect(),
        })
    }

    fn find<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (usize, usize, u32)> + 'a {
        let found = self.automaton.iter().flat_map(move |automaton| automaton.find_iter(text));
        found.map(|hit| (hit.start(), hit.end(), self.ids[hit.pattern().as_usize()]))
    }

    fn strips_after(&self, id: u32) -> bool {
        !self.keep_space_after.contains(&id)
    }
}

/// Marks a missing neighbor.
const NONE: usize = usize::MAX;

/// A part of the text. An empty symbol was merged into its left neighbor.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    length: usize,
    previous: usize,
    next: usize,
}

/// Two neighbors that can be merged.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    /// The total length of both symbols in bytes when the pair was found. If the length differs later, one of the
    /// symbols has been merged with another neighbor.
    length: usize,
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

struct Merge<'a> {
    spm: &'a Spm,
    text: &'a str,
    symbols: Vec<Symbol>,
    pairs: BinaryHeap<Pair>,
    /// For each unused piece that can be merged, the length of its left part. Unused pieces are split again at the end.
    unused: HashMap<&'a str, usize>,
}

impl<'a> Merge<'a> {
    fn new(spm: &'a Spm, text: &'a str) -> Self {
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(index, (start, c))| Symbol {
                start,
                length: c.len_utf8(),
                previous: index.wrapping_sub(1),
                next: index + 1,
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
        Self { spm, text, symbols, pairs: BinaryHeap::new(), unused: HashMap::new() }
    }

    fn run(mut self, tokens: &mut Vec<u32>) -> Result<(), EncodeError> {
        for right in 1..self.symbols.len() {
            self.offer(right - 1, right);
        }
        while let Some(pair) = self.pairs.pop() {
            let (left, right) = (self.symbols[pair.left], self.symbols[pair.right]);
            if left.length == 0 || right.length == 0 || left.length + right.length != pair.length {
                continue;
            }
            self.symbols[pair.left].length = pair.length;
            self.symbols[pair.left].next = right.next;
            self.symbols[pair.right].length = 0;
            if right.next != NONE {
                self.symbols[right.next].previous = pair.left;
            }
            self.offer(left.previous, pair.left);
            self.offer(pair.left, right.next);
        }
        let mut at = if self.symbols.is_empty() { NONE } else { 0 };
        while at != NONE {
            let Symbol { start, length, next, .. } = self.symbols[at];
            self.emit(&self.text[start..start + length], tokens)?;
            at = next;
        }
        Ok(())
    }

    fn offer(&mut self, left: usize, right: usize) {
        if left == NONE || right == NONE {
            return;
        }
        let (a, b) = (self.symbols[left], self.symbols[right]);
        let length = a.length + b.length;
        let piece = &self.text[a.start..a.start + length];
        if let Some(&(_, score, unused)) = self.spm.joinable.get(piece) {
            self.pairs.push(Pair { score, left, right, length });
            if unused {
                self.unused.insert(piece, a.length);
            }
        }
    }

    fn emit(&self, piece: &str, tokens: &mut Vec<u32>) -> Result<(), EncodeError> {
        match self.spm.joinable.get(piece) {
            Some((id, _, false)) => {
                tokens.push(*id);
                return Ok(());
            }
            Some(_) => {
                if let Some(&left) = self.unused.get(piece) {
                    self.emit(&piece[..left], tokens)?;
                    return self.emit(&piece[left..], tokens);
                }
            }
            None => {}
        }
        // The piece is a single character that has no token, or only an unused one.
        for byte in piece.bytes() {
            match (self.spm.bytes[usize::from(byte)], self.spm.unknown) {
                (Some(id), _) => tokens.push(id),
                (None, Some(id)) => {
                    tokens.push(id);
                    return Ok(());
                }
                (None, None) => {
                    return Err(EncodeError(format!("the vocabulary has no token for {piece:?}")));
                }
            }
        }
        Ok(())
    }
}
