//! An input of a model, whose memory is reused in every step.

use crate::Error;
use crate::runtime::{Element, InferRequest, Port, Tensor};

/// Whether a model has an input.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum InputPresence {
    InModel,
    Absent,
}

impl InputPresence {
    pub(super) fn of(is_in_model: bool) -> Self {
        if is_in_model { Self::InModel } else { Self::Absent }
    }
}

/// The shape of an input with values for each token of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum InputShape {
    /// `[tokens]`
    Tokens,
    /// `[3, tokens]`
    Streams,
    /// `[tokens, 1]`
    Column,
    /// `[1, tokens]`
    Row,
    /// `[layers, tokens, columns]`
    Layers { layers: usize, columns: usize },
    /// `[tokens, columns]`
    Rows(usize),
}

impl InputShape {
    pub(super) fn of_positions(port: &Port) -> Option<Self> {
        match port.shape[..] {
            [_] => Some(Self::Tokens),
            [Some(3), _] => Some(Self::Streams),
            _ => None,
        }
    }

    /// Number of values for each token.
    pub(super) fn columns(self) -> usize {
        match self {
            Self::Tokens | Self::Column | Self::Row => 1,
            Self::Streams => 3,
            Self::Rows(columns) => columns,
            Self::Layers { layers, columns } => layers * columns,
        }
    }

    /// Returns the number of layers that each read separate values, or 0 if all layers read the same ones.
    pub(super) fn layers(self) -> usize {
        if let Self::Layers { layers, .. } = self { layers } else { 0 }
    }

    /// Number of positions of each token.
    pub(super) fn streams(self) -> usize {
        if self == Self::Streams { 3 } else { 1 }
    }

    fn dimensions(self, tokens: i64) -> Vec<i64> {
        match self {
            Self::Tokens => vec![tokens],
            Self::Streams => vec![3, tokens],
            Self::Column => vec![tokens, 1],
            Self::Row => vec![1, tokens],
            Self::Rows(columns) => vec![tokens, columns as i64],
            Self::Layers { layers, columns } => vec![layers as i64, tokens, columns as i64],
        }
    }
}

/// An input whose memory is reused. Writes to an absent input have no effect.
pub(super) struct Input<T> {
    name: &'static str,
    pub(super) tensor: Tensor,
    pub(super) shape: InputShape,
    pub(super) length: i64,
    pub(super) presence: InputPresence,
    _element: std::marker::PhantomData<T>,
}

/// Number of tokens for which an input initially has room. The input grows when a batch needs more.
const INPUT_TOKENS: i64 = 4096;

impl<T: Element> Input<T> {
    pub(super) fn new(name: &'static str, presence: InputPresence) -> Result<Self, Error> {
        Self::with_shape(name, presence, InputShape::Tokens)
    }

    pub(super) fn with_shape(
        name: &'static str,
        presence: InputPresence,
        shape: InputShape,
    ) -> Result<Self, Error> {
        // An absent input is never written, so memory for one token is enough.
        let length = if presence == InputPresence::Absent { 1 } else { INPUT_TOKENS };
        let tensor = Tensor::new(T::TYPE, &shape.dimensions(length))?;
        Ok(Self { name, tensor, shape, length, presence, _element: std::marker::PhantomData })
    }

    pub(super) fn bind(&self, request: &mut InferRequest) -> Result<(), Error> {
        match self.presence {
            InputPresence::InModel => request.set(self.name, &self.tensor),
            InputPresence::Absent => Ok(()),
        }
    }

    pub(super) fn write(&mut self, length: usize, values: impl Iterator<Item = T>) -> Result<(), Error> {
        if self.presence == InputPresence::Absent {
            return Ok(());
        }
        for (to, value) in self.values_mut(length)?.iter_mut().zip(values) {
            *to = value;
        }
        Ok(())
    }

    /// The values of `length` tokens, to be written.
    pub(super) fn values_mut(&mut self, length: usize) -> Result<&mut [T], Error> {
        let length = length as i64;
        if self.length != length {
            self.tensor.reshape(&self.shape.dimensions(length))?;
            self.length = length;
        }
        self.tensor.values_mut::<T>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Core;

    #[test]
    fn an_input_that_cannot_grow_fails_each_time() {
        let _core = Core::new().expect("OpenVINO starts");
        // The memory of the first input cannot be allocated, and the size of the second one in bytes does not fit into
        // 64 bits.
        for length in [usize::MAX / 16, usize::MAX / 2] {
            let mut input: Input<i64> =
                Input::new("input", InputPresence::InModel).expect("it fits into memory");
            for attempt in 1..=2 {
                assert!(input.values_mut(length).is_err(), "attempt {attempt} with {length} tokens");
            }
        }
    }
}
