//! Messages between two ranks, which the others know nothing of.

use dist_transport::{Incoming, Outgoing, Sink};

use super::{Engine, Manner, number};
use crate::{Call, Element, Error, Operation, Result};

impl Engine {
    pub(crate) fn send<T: Element>(&mut self, elements: &[T], to: usize, manner: Manner) -> Result<()> {
        self.check_rank(to)?;
        let call = self.begin_messages::<T>(elements.len(), self.rank().index());
        let parts = [bytemuck::cast_slice(elements)];
        let sent = self.transport.exchange(Some(Outgoing { to, parts: &parts }), None, manner.deadline);
        sent.map_err(|source| Error::in_call(call, source))
    }

    pub(crate) fn receive<T: Element>(
        &mut self,
        elements: &mut [T],
        from: usize,
        manner: Manner,
    ) -> Result<()> {
        self.check_rank(from)?;
        let call = self.begin_messages::<T>(elements.len(), from);
        let received = self.transport.exchange(None, Some(incoming(elements, from)), manner.deadline);
        received.map_err(|source| Error::in_call(call, source))
    }

    pub(crate) fn send_receive<T: Element>(
        &mut self,
        sent: &[T],
        to: usize,
        received: &mut [T],
        from: usize,
        manner: Manner,
    ) -> Result<()> {
        self.check_rank(to)?;
        self.check_rank(from)?;
        let call = self.begin_messages::<T>(received.len(), from);
        let parts = [bytemuck::cast_slice(sent)];
        let (send, receive) = (Outgoing { to, parts: &parts }, incoming(received, from));
        let done = self.transport.exchange(Some(send), Some(receive), manner.deadline);
        done.map_err(|source| Error::in_call(call, source))
    }

    /// Messages are not counted: those between two ranks keep their order, and the transport compares lengths.
    fn begin_messages<T: Element>(&mut self, count: usize, sender: usize) -> Call {
        let call = Call {
            epoch: 0,
            channel: self.transport.channel().get(),
            sequence: 0,
            operation: Operation::Message,
            dtype: Some(T::DTYPE),
            count: count as u64,
            sizes: 0,
            op: None,
            root: Some(number(sender)),
            algorithm: None,
            order: None,
        };
        self.announce(&call);
        call
    }
}

fn incoming<T: Element>(elements: &mut [T], from: usize) -> Incoming<'_> {
    let memory = bytemuck::cast_slice_mut(elements);
    Incoming { from, len: memory.len(), sink: Sink::Into(memory) }
}
