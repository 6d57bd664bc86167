//! Main.
fn main(){}
