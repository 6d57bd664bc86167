//! The named pre-tokenizers of GGUF files, which split text into words before byte pairs are merged.
//!
//! A GGUF file contains no regular expressions, only a name (`tokenizer.ggml.pre`). The expressions here match the same
//! text as those of the `tokenizer.json` files to which the names refer.

use tokenizers::{
    NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior,
    normalizers::unicode::NFC,
    pre_tokenizers::{
        byte_level::ByteLevel,
        digits::Digits,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

/// A named pre-tokenizer.
pub(super) struct PreTokenizer {
    steps: &'static [Step],
    nfc: bool,
    /// Whether a word that is in the vocabulary becomes that token regardless of the merges.
    pub(super) ignore_merges: bool,
    /// Whether the token that begins a text is added by default.
    pub(super) adds_bos: bool,
}

enum Step {
    /// The matches of the expression are words, and so are the parts between them.
    Regex(&'static str),
    /// Each digit is a word.
    Digits,
}

use Step::{Digits as D, Regex as R};

// Two expressions have a lookbehind that the originals lack. The lookbehinds change no match. Without them, these
// expressions would scan a run of whitespace again from each position in the run.

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|(?<![^\S\r\n])\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const MINICPM5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+";
const CJK: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
const CJK_KANA: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
const BLOOM: &str = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+";

/// The pre-tokenizer with this name, if it is known.
pub(super) fn named(name: &str) -> Option<PreTokenizer> {
    let plain = |steps| PreTokenizer { steps, nfc: false, ignore_merges: false, adds_bos: false };
    let nfc = |steps| PreTokenizer { nfc: true, ..plain(steps) };
    let whole_words = |steps| PreTokenizer { ignore_merges: true, ..plain(steps) };
    let with_bos = |steps| PreTokenizer { adds_bos: true, ..whole_words(steps) };
    Some(match name {
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" => {
            with_bos(&[R(LLAMA3)])
        }
        "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => plain(&[R(LLAMA3)]),
        "jais-2" => plain(&[R(JAIS2)]),
        "minicpm5" => whole_words(&[R(r"\p{N}{1,3}"), R(MINICPM5)]),
        "qwen2" => nfc(&[R(QWEN2)]),
        "qwen35" => nfc(&[R(QWEN35)]),
        "deepseek-r1-qwen" | "kormo" | "megrez" | "stablelm2" | "hunyuan" | "solar-open" | "grok-2" => {
            plain(&[R(QWEN2)])
        }
        "tekken" => with_bos(&[R(TEKKEN)]),
        "gpt-4o" | "llama4" | "kanana2" | "minimax-m2" | "o200k" => plain(&[R(GPT4O)]),
        "command-r" => nfc(&[D, R(GPT2)]),
        "smollm" | "starcoder" | "refact" | "codeshell" | "exaone" | "minerva-7b" | "mellum2" => {
            plain(&[D, R(GPT2)])
        }
        "mpt" | "olmo" => nfc(&[R(GPT2)]),
        "gpt-2" | "phi-2" | "gigachat" | "a.x-4.0" | "mellum" | "exaone4" | "jais" | "trillion"
        | "granite-docling" => plain(&[R(GPT2)]),
        "falcon" => plain(&[R(r"[\p{P}\$\+<=>\^~\|`]+"), R(GPT2), R("[0-9][0-9][0-9]")]),
        "default" => plain(&[R(r"[\p{P}\$\+<=>\^~\|]+"), R(GPT2), R(r"\p{N}+"), R("[0-9][0-9][0-9]")]),
        "deepseek-llm" => plain(&[
            R(r"[\r\n]"),
            R(DEEPSEEK_LETTERS),
            R(r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"),
            R(r"(?<!\s)\s+$"),
            R(CJK),
            R(r"\p{N}+"),
        ]),
        "deepseek-coder" => plain(&[R(r"[\r\n]"), R(r"\s?\p{L}+"), R(r"\s?\p{P}+"), R(CJK), D]),
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" => {
            plain(&[R(r"\p{N}{1,3}"), R(CJK_KANA), R(DEEPSEEK3)])
        }
        "bailingmoe" | "bailingmoe2" | "llada-moe" => plain(&[R(BAILING)]),
        "seed-coder" => plain(&[R(SEED_CODER)]),
        "exaone-moe" => plain(&[R(EXAONE_MOE)]),
        "poro-chat" | "bloom" | "gpt3-finnish" => plain(&[R(BLOOM)]),
        "viking" => plain(&[R(BLOOM), D]),
        _ => return None,
    })
}

impl PreTokenizer {
    /// Returns the normalizer that is applied to text before it is split, if there is one.
    pub(super) fn normalizer(&self) -> Option<NormalizerWrapper> {
        self.nfc.then_some(NormalizerWrapper::NFC(NFC))
    }

    /// Returns the pre-tokenizer that splits text into words and maps the bytes of each word to the byte-level
    /// alphabet.
    pub(super) fn pre_tokenizer(&self) -> Result<PreTokenizerWrapper, tokenizers::Error> {
        let mut steps = Vec::new();
        for step in self.steps {
            steps.push(match step {
                Step::Regex(regex) => {
                    let pattern = SplitPattern::Regex((*regex).to_owned());
                    Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into()
                }
                Step::Digits => Digits::new(true).into(),
            });
        }
        steps.push(ByteLevel::new(false, false, false).into());
        Ok(Sequence::new(steps).into())
    }
}
