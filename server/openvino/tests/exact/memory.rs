//! While a model is loaded, each weight is in memory only once.

use std::path::{Path, PathBuf};
use std::process::Command;

use server_gguf::TensorType;
use server_gguf::write::GgufWriter;
use server_openvino::load;

use crate::reference::{ROUNDED, config};

const HIDDEN: u64 = 1024;
const FEED_FORWARD: u64 = 4096;
const HEADS: u64 = 16;
const KV_HEADS: u64 = 4;
const LAYERS: u64 = 10;
const VOCABULARY: u64 = 4096;

/// The environment variable with which the test below passes the path of the file to the process that loads it.
const FILE: &str = "OVFLEET_TEST_LOADED_FILE";

/// Writes a model with the tensor types of a Q4_K_M file.
fn write(path: &Path) {
    let mut file = GgufWriter::new("llama");
    let mut set = |key: &str, value: u64| {
        file.metadata(&format!("llama.{key}"), value as u32);
    };
    set("context_length", 512);
    set("embedding_length", HIDDEN);
    set("block_count", LAYERS);
    set("feed_forward_length", FEED_FORWARD);
    set("attention.head_count", HEADS);
    set("attention.head_count_kv", KV_HEADS);
    set("rope.dimension_count", HIDDEN / HEADS);
    set("vocab_size", VOCABULARY);
    let tokens: Vec<String> = (0..VOCABULARY).map(|token| format!("<{token}>")).collect();
    file.metadata("llama.attention.layer_norm_rms_epsilon", 1e-5f32)
        .metadata("tokenizer.ggml.model", "gpt2")
        .metadata("tokenizer.ggml.pre", "default")
        .metadata("tokenizer.ggml.tokens", tokens)
        .metadata("tokenizer.ggml.token_type", vec![1i32; VOCABULARY as usize])
        .metadata("tokenizer.ggml.merges", vec!["< 1".to_owned()]);
    let mut matrix = |name: &str, kind: TensorType, columns: u64, rows: u64| {
        let blocks = (columns * rows) as usize / kind.block_values();
        // The scales of a block are about 2^-14 for both types, and the quants are arbitrary.
        let block: Vec<u8> =
            (0..kind.block_bytes()).map(|at| if at % 2 == 1 { 4 } else { (at * 29 % 251) as u8 }).collect();
        file.tensor(name, &[columns, rows], kind, block.repeat(blocks));
    };
    let (most, more) = (TensorType::Q4K, TensorType::Q6K);
    matrix("token_embd.weight", most, HIDDEN, VOCABULARY);
    matrix("output.weight", more, HIDDEN, VOCABULARY);
    for layer in 0..LAYERS {
        let name = |name: &str| format!("blk.{layer}.{name}.weight");
        let second = if layer % 2 == 0 { more } else { most };
        let kv = HIDDEN / HEADS * KV_HEADS;
        matrix(&name("attn_q"), most, HIDDEN, HIDDEN);
        matrix(&name("attn_k"), most, HIDDEN, kv);
        matrix(&name("attn_v"), second, HIDDEN, kv);
        matrix(&name("attn_output"), most, HIDDEN, HIDDEN);
        matrix(&name("ffn_gate"), most, HIDDEN, FEED_FORWARD);
        matrix(&name("ffn_up"), most, HIDDEN, FEED_FORWARD);
        matrix(&name("ffn_down"), second, FEED_FORWARD, HIDDEN);
    }
    let mut norm = |name: &str| {
        file.tensor_of(name, &[HIDDEN], TensorType::F32, &vec![1.0; HIDDEN as usize]);
    };
    norm("output_norm.weight");
    for layer in 0..LAYERS {
        norm(&format!("blk.{layer}.attn_norm.weight"));
        norm(&format!("blk.{layer}.ffn_norm.weight"));
    }
    file.write(path).unwrap();
}

fn status_bytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse::<u64>().unwrap() * 1024
}

#[test]
#[ignore = "the test below runs it in a separate process"]
fn loads_a_file_in_this_process() {
    let path = PathBuf::from(std::env::var_os(FILE).unwrap());
    // Load a small model first, because the first load also loads the libraries.
    let small = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    crate::reference::recipe("llama", TensorType::Q4K).write(small.path());
    drop(load(&config(small.path(), &ROUNDED), &mut |_| {}).unwrap());
    let before = status_bytes("VmRSS:");
    drop(load(&config(&path, &ROUNDED), &mut |_| {}).unwrap());
    std::fs::write(path.with_extension("peak"), (status_bytes("VmHWM:") - before).to_string()).unwrap();
}

/// Loads the file in a separate process. Returns the difference in bytes between the peak of the resident memory and
/// the resident memory before the file is loaded.
fn peak(path: &Path) -> u64 {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "memory::loads_a_file_in_this_process", "--ignored"]).env(FILE, path);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    std::fs::read_to_string(path.with_extension("peak")).unwrap().parse().unwrap()
}

#[test]
fn weights_are_in_memory_once_while_a_model_is_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    write(&path);
    let bytes = std::fs::metadata(&path).unwrap().len();
    let once = peak(&path) as f64 / bytes as f64;
    eprintln!("the file has {bytes} bytes; the peak is {once:.2} times as large");
    assert!(once < MULTIPLE_MAX, "{once:.2} times the size of the file");
}

/// The largest allowed ratio of the peak to the size of the file. The packed weights are about 1.1 times as large as
/// the file. The rest is memory that the runtime needs to compile the model.
const MULTIPLE_MAX: f64 = 1.6;
