//! Generates the Rust code for `replica.proto` and `router.proto` with `protox`, a compiler that is written in Rust, so
//! that builds need no `protoc`.

const FILES: [&str; 2] = ["replica.proto", "router.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for file in FILES {
        println!("cargo::rerun-if-changed={file}");
    }
    let descriptors = protox::compile(FILES, ["."])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
