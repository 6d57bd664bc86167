//! Tests LoRA adapters with the real model, directly and through the router: requests select adapters by name, and a
//! batch can contain requests with different adapters.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tests::http::{self, Response};
use tests::router::{Router, replica};
use tests::server::{EXACT, Server};

/// The number of layers of the sample model, and its value and output projections with their rows and columns.
const LAYERS: usize = 30;
const PROJECTIONS: [(&str, usize, usize); 2] = [("v_proj", 192, 576), ("o_proj", 576, 576)];
const RANK: usize = 4;

/// Writes an adapter whose effect is proportional to `size`; an adapter with size 0 changes nothing.
fn adapter(directory: &Path, size: f32) -> PathBuf {
    let (mut header, mut data) = (Map::new(), Vec::new());
    let mut state = 1u32;
    for layer in 0..LAYERS {
        for (name, rows, columns) in PROJECTIONS {
            for (half, shape, size) in [("A", [RANK, columns], 0.05), ("B", [rows, RANK], size)] {
                let begin = data.len();
                for _ in 0..shape[0] * shape[1] {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let value = ((state >> 8) as f32 / (1u32 << 24) as f32 - 0.5) * size;
                    data.extend(value.to_le_bytes());
                }
                let tensor = json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
                let name =
                    format!("base_model.model.model.layers.{layer}.self_attn.{name}.lora_{half}.weight");
                header.insert(name, tensor);
            }
        }
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    file.extend(data);
    std::fs::create_dir_all(directory).expect("the directory can be created");
    std::fs::write(directory.join("adapter_model.safetensors"), file).expect("the matrices can be written");
    let config = json!({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK});
    std::fs::write(directory.join("adapter_config.json"), config.to_string())
        .expect("the configuration can be written");
    directory.to_owned()
}

async fn ask(url: &str, model: &str) -> Response {
    let body = json!({
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 24,
    });
    http::post(url, &body).await.expect("the server responds")
}

#[tokio::test]
async fn each_request_uses_the_adapter_that_it_names() {
    let directory = tempfile::tempdir().unwrap();
    let still = adapter(&directory.path().join("still"), 0.0);
    let loud = adapter(&directory.path().join("loud"), 20.0);
    let flags =
        [("still", still), ("loud", loud)].map(|(name, path)| format!("--lora={name}={}", path.display()));
    let arguments: Vec<&str> =
        ["--model-name=base"].into_iter().chain(flags.iter().map(String::as_str)).chain(EXACT).collect();
    let server = Server::start(&arguments).unwrap();
    let router = Router::start(&[replica(&server)]).unwrap();
    let direct = server.url("/v3/chat/completions");
    let base = ask(&direct, "base").await.text().to_owned();
    assert!(base.contains("Paris"), "{base}");
    assert_eq!(ask(&direct, "still").await.text(), base, "an adapter of zeros changed the response");
    let loud = ask(&direct, "loud").await.text().to_owned();
    assert_ne!(loud, base);

    let routed = router.url("/v3/chat/completions");
    for url in [&direct, &routed] {
        let all = http::join_all((0..12).map(|index| ask(url, ["base", "still", "loud"][index % 3]))).await;
        for (index, answer) in all.iter().enumerate() {
            assert_eq!(answer.text(), [&base, &base, &loud][index % 3], "{index}: {}", answer.body);
        }
    }
    let listed = http::get(&router.url("/v3/models")).await.unwrap().body;
    let mut names: Vec<_> = listed["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    names.sort_by_key(|name| name.to_string());
    assert_eq!(names, ["base", "loud", "still"]);
    assert_eq!(ask(&routed, "other").await.status, 404);
}
