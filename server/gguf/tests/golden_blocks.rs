//! Blocks with random quants, and the values that the reference implementation (Python package `gguf`) gives
//! for them: a line of `blocks.txt` is a type, the block's bytes and the values' bytes, in hexadecimal.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use server_gguf::{TensorType, blocks, dequantize};

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn golden() -> Vec<(TensorType, Vec<u8>, Vec<u32>)> {
    // Any larger file of the same form can be put in its place.
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
fn every_quantised_type_has_golden_blocks() {
    let golden = golden();
    let quantised: Vec<_> = TensorType::ALL.iter().filter(|kind| kind.is_quantized()).collect();
    assert_eq!(quantised.len(), 10);
    for kind in quantised {
        assert!(golden.iter().any(|(other, ..)| other == kind), "{kind}");
    }
}

#[test]
fn dequantised_blocks_equal_the_reference_to_the_last_bit() {
    for (kind, block, expected) in golden() {
        let mut values = vec![0.0; expected.len()];
        dequantize(kind, &block, &mut values).unwrap();
        let bits: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
        assert_eq!(bits, expected, "{kind}");
    }
}

#[test]
fn decoded_blocks_evaluate_to_the_reference_to_the_last_bit() {
    for (kind, block, expected) in golden() {
        let affine = blocks::decode(kind, &block).unwrap();
        let form = blocks::form(kind).unwrap();
        assert_eq!((affine.bits, affine.group, affine.zero), (form.bits, form.group, form.zero));
        assert!(affine.quants.iter().all(|&quant| u32::from(quant) < 1 << form.bits), "{kind}");
        for (index, expected) in expected.iter().enumerate() {
            assert_eq!(affine.value(index).to_bits(), *expected, "{kind} {index}");
        }
    }
}
