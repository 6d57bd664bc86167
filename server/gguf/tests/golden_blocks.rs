//! Compares decoded blocks of random quants with the values that the reference implementation (the Python package
//! `gguf`) decodes from them. Each line of `blocks.txt` contains a type, the bytes of a block and the bytes of its
//! values, in hexadecimal.

#![expect(clippy::unwrap_used, reason = "a failed precondition fails the test")]

use server_gguf::{TensorType, blocks, dequantize};

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn golden() -> Vec<(TensorType, Vec<u8>, Vec<u32>)> {
    // `GGUF_GOLDEN_BLOCKS` can name a larger file in the same format.
    let text = match std::env::var("GGUF_GOLDEN_BLOCKS") {
        Ok(path) => std::fs::read_to_string(path).unwrap(),
        Err(_) => include_str!("blocks.txt").to_owned(),
    };
    text.lines()
        .map(|line| {
            let mut fields = line.split(' ');
            let kind = fields.next().unwrap();
            let kind = *TensorType::ALL.iter().find(|t| t.name() == kind).unwrap();
            let block = bytes(fields.next().unwrap());
            let values = bytes(fields.next().unwrap());
            let values = values.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
            (kind, block, values)
        })
        .collect()
}

#[test]
fn every_quantized_type_has_golden_blocks() {
    let golden = golden();
    let quantized: Vec<_> = TensorType::ALL.iter().filter(|kind| kind.is_quantized()).collect();
    assert_eq!(quantized.len(), 11);
    for kind in quantized {
        assert!(golden.iter().any(|(other, ..)| other == kind), "{kind}");
    }
}

#[test]
fn dequantized_blocks_are_bit_exact_with_the_reference() {
    for (kind, block, expected) in golden() {
        let mut values = vec![0.0; expected.len()];
        dequantize(kind, &block, &mut values).unwrap();
        let bits: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
        assert_eq!(bits, expected, "{kind}");
    }
}

#[test]
fn values_of_decoded_blocks_are_bit_exact_with_the_reference() {
    for (kind, block, expected) in golden() {
        let affine = blocks::decode(kind, &block).unwrap();
        let layout = kind.quant_layout().unwrap();
        assert_eq!((affine.bits, affine.group, affine.zero), (layout.bits, layout.group, layout.zero));
        assert!(affine.quants.iter().all(|&quant| u32::from(quant) < 1 << layout.bits), "{kind}");
        for (index, expected) in expected.iter().enumerate() {
            assert_eq!(affine.value(index).to_bits(), *expected, "{kind} {index}");
        }
    }
}
