"""x"""
import os, torch, pytest
from cute_kernels.rowwise import cpu, config
from cute_kernels.rowwise.triton import launch
from ..contract import same_bytes
from ..triton_in_numpy import same_on_every_machine  # noqa: F401
from .triton_harness import cpu_arithmetic, device_guard
@pytest.mark.parametrize("kind", config.KINDS)
def test_a(kind):
    x = torch.randn(3, 700)*5
    dy=torch.randn_like(x)
    for n in ("activation",):
        a,b=getattr(cpu,n)(x,kind),getattr(launch,n)(x,kind)
        print(kind, ((a-b).abs()/a.abs().clamp_min(2**-126.)).max()*2**24)
        a,b=cpu.activation_backward(dy,x,kind),launch.activation_backward(dy,x,kind)
        print(kind, ((a-b).abs()).max()*2**24)
        u=torch.randn_like(x)
        for a,b in zip(cpu.gated_backward(dy,x,u,kind),launch.gated_backward(dy,x,u,kind)): print(((a-b).abs()).max()*2**24)
def test_s():
    for n in (1,2,7,700,1500):
        x=torch.randn(3,n)*3; dy=torch.randn_like(x)
        for f in ("softmax","log_softmax"):
            a,b=getattr(cpu,f)(x,torch.float32),getattr(launch,f)(x,torch.float32)
            print(n,f,((a-b).abs()/a.abs().clamp_min(2**-126.)).max()*2**24)
            g=x if f[0]=="l" else a
            args=(dy,g) if f[0]=="l" else (dy,g,torch.float32)
            print(n,(getattr(cpu,f+"_backward")(*args)-getattr(launch,f+"_backward")(*args)).abs().max()*2**24)
def test_r():
    pos=torch.randint(0,100000,(50,)); inv=1/10000**(torch.arange(0,64,2)/64)
    for a,b in zip(cpu.rotary_table(pos,inv,1.25,torch.float32),launch.rotary_table(pos,inv,1.25,torch.float32)): assert same_bytes(a,b)
    c,s=cpu.rotary_table(pos,inv,1.25,torch.float32); s[:,32:]*=2
    x=torch.randn(2,3,50,80); c,s=(t.expand(2,3,50,64) for t in (c,s))
    for back in (0,1): print((cpu.rotary(x,c,s,bool(back))-launch.rotary(x,c,s,bool(back))).abs().max())
def test_e():
    ids=torch.randint(0,20,(200,)); dy=torch.randn(200,300); 
    a=torch.randn(25,300); b=a.clone(); cpu.embedding_gradient(dy,ids,3,a); launch.embedding_gradient(dy,ids,3,b); assert same_bytes(a,b)
    x=torch.randn(70000)
    assert same_bytes(cpu.square_sum(x),launch.square_sum(x))
    assert same_bytes(cpu.add_sums(x.double()[:77]),launch.add_sums(x.double()[:77]))
    a=x.clone(); b=x.clone(); f=torch.tensor(0.3); cpu.scale_(a,f); launch.scale_(b,f); assert same_bytes(a,b)
