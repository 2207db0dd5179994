//! Messages between two ranks; the other ranks are not involved.

use bytemuck::Pod;
use dist_transport::{Incoming, Outgoing, Sink};

use super::{CallOptions, Engine};
use crate::history::HistoryDigest;
use crate::{Call, ElementType, Error, Message, Operation, Result};

impl Engine {
    pub(crate) fn send<T: Pod>(
        &mut self,
        elements: &[T],
        to: usize,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.check_rank(to)?;
        let call = self.begin_messages::<T>(elements.len(), Some(self.rank().index()));
        let parts = [bytemuck::cast_slice(elements)];
        let sent = self.transport.exchange(Some(Outgoing { to, parts: &parts }), None, &options.due);
        sent.map_err(|source| Error::in_call(call, source))
    }

    pub(crate) fn receive<T: Pod>(
        &mut self,
        elements: &mut [T],
        from: usize,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.check_rank(from)?;
        let call = self.begin_messages::<T>(elements.len(), Some(from));
        let received = self.transport.exchange(None, Some(incoming(elements, from)), &options.due);
        received.map_err(|source| Error::in_call(call, source))
    }

    pub(crate) fn send_receive<T: Pod>(
        &mut self,
        sent: &[T],
        to: usize,
        received: &mut [T],
        from: usize,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.check_rank(to)?;
        self.check_rank(from)?;
        let call = self.begin_messages::<T>(0, None);
        let parts = [bytemuck::cast_slice(sent)];
        let (send, receive) = (Outgoing { to, parts: &parts }, incoming(received, from));
        let done = self.transport.exchange(Some(send), Some(receive), &options.due);
        done.map_err(|source| Error::in_call(call, source))
    }

    pub(crate) fn batch<T: Pod>(
        &mut self,
        messages: &mut [Message<'_, T>],
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let (mut sent, mut receives) = (Vec::new(), Vec::new());
        for message in messages {
            match message {
                Message::Send { to, elements } => sent.push((*to, [bytemuck::cast_slice(elements)])),
                Message::Receive { from, elements } => receives.push(incoming(elements, *from)),
            }
        }
        let sends: Vec<_> = sent.iter().map(|(to, parts)| Outgoing { to: *to, parts }).collect();
        let peers = sends.iter().map(|send| send.to).chain(receives.iter().map(|receive| receive.from));
        peers.into_iter().try_for_each(|peer| self.check_rank(peer))?;
        let call = self.begin_messages::<T>(0, None);
        let done = self.transport.exchange_all(&sends, &mut receives, &options.due);
        done.map_err(|source| Error::in_call(call, source))
    }

    /// Begins messages of `T`. They have no sequence number, because messages between two ranks keep their order and
    /// the transport compares their lengths. Only errors of this rank show `count` and `sender`.
    fn begin_messages<T: Pod>(&mut self, count: usize, sender: Option<usize>) -> Call {
        let element = ElementType::of::<T>();
        let call = Call {
            channel: self.channel,
            sequence: 0,
            started: self.history.is_of_worker(),
            operation: Operation::Message,
            element: Some(element),
            count: count as u64,
            sizes: 0,
            op: None,
            root: sender.map(|sender| self.code(sender)),
            algorithm: None,
            order: None,
            part: 0,
            past: HistoryDigest::default(),
            after_agreement: false,
        };
        let encoded = match self.messages {
            Some((last, encoded)) if last == element => encoded,
            _ => self.messages.insert((element, call.encode())).1,
        };
        self.announce(&call, &encoded);
        call
    }
}

fn incoming<T: Pod>(elements: &mut [T], from: usize) -> Incoming<'_> {
    let memory = bytemuck::cast_slice_mut(elements);
    Incoming { from, len: memory.len(), sink: Sink::Into(memory) }
}
