//! What is served is the model that the file contains: random weights of every common architecture and tensor
//! type against a plain forward pass.

mod architectures;
mod quantised;
mod reference;
