//! Generates the Rust side of `replica.proto`. The compiler is `protox`, in Rust, so that a build needs no
//! `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=replica.proto");
    let descriptors = protox::compile(["replica.proto"], ["."])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
