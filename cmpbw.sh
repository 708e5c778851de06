. /root/e.sh; cd /root/w
for i in 1 2; do
 timeout 200 torchrun --nproc-per-node 2 bw.py /root/w/d/random 2>&1 | grep ratio
done
