//! What a rank has to hold.

use super::Strategy;

/// A model and its optimizer, which keeps two numbers per parameter, as Adam does.
#[derive(Debug, Clone, Copy)]
pub(super) struct Model {
    pub(super) params: u64,
    pub(super) element_bytes: u64,
    /// As how many parts it is gathered.
    pub(super) units: u64,
}

impl Model {
    /// Bytes of all parameters.
    pub(super) const fn bytes(&self) -> u64 {
        self.params * self.element_bytes
    }

    /// Bytes of the largest unit.
    pub(super) const fn unit_bytes(&self) -> u64 {
        self.params.div_ceil(self.units) * self.element_bytes
    }

    /// The most bytes that a rank has to hold at once for parameters, gradients and the optimizer's state, where
    /// that which is sharded is sharded over so many ranks. Activations are not in it, nor what the transport needs.
    ///
    /// Where parameters are sharded, two units are there in full: the one that is worked on, and the next. And the
    /// gradients of one unit are, until they have been reduced.
    pub(super) const fn peak(&self, strategy: Strategy, shards: u64) -> u64 {
        let (all, part) = (self.bytes(), self.params.div_ceil(shards) * self.element_bytes);
        match strategy {
            Strategy::Ddp => 4 * all,
            Strategy::Zero1 => 2 * all + 2 * part,
            Strategy::Zero2 => all + 3 * part,
            Strategy::Fsdp | Strategy::Hybrid if shards == 1 => 4 * all,
            Strategy::Fsdp | Strategy::Hybrid => {
                let full = 3 * self.unit_bytes();
                4 * part + if full < 2 * all { full } else { 2 * all }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sharded_is_held_once_by_all_together() {
        let model = Model { params: 100, element_bytes: 4, units: 10 };
        let peak = |strategy, shards| model.peak(strategy, shards);
        assert_eq!(peak(Strategy::Ddp, 8), 16 * 100);
        assert_eq!(peak(Strategy::Zero1, 8), 8 * 100 + 8 * 13);
        assert_eq!(peak(Strategy::Zero2, 8), 4 * 100 + 12 * 13);
        assert_eq!(peak(Strategy::Fsdp, 8), 16 * 13 + 3 * 40);
        for strategy in [Strategy::Zero1, Strategy::Zero2, Strategy::Fsdp, Strategy::Hybrid] {
            assert_eq!(peak(strategy, 1), 16 * 100);
        }
    }
}
